from gateway.dispatch import dispatcher
from gateway.dispatch.dispatcher import REPEAT_S, UnownedAttempts
from protocol.job import Accepted, Cancel, Finished, Frame, Tokens


def tokens(request_id: str, seq: int = 1) -> Frame:
    return Tokens(request_id, 1, seq, 0, (1,), "x")


class Cancels:
    """A table of unowned attempts, and the workers that got a Cancel."""

    def __init__(self) -> None:
        self.cancels: list[tuple[str, str, int]] = []
        self.now_s = 0.0
        self.attempts = UnownedAttempts(self._cancel)

    def _cancel(self, worker_id: str, cancel: Cancel) -> None:
        self.cancels.append((worker_id, cancel.request_id, cancel.attempt))
        self.attempts.cancelled(worker_id, cancel, self.now_s)


def test_each_gets_repeated_cancels_while_it_continues() -> None:
    table = Cancels()
    table.attempts.on_frame("w", Accepted("r", 1, 0, "w", "p", "p", "r", 0.0), 0.0)
    for tick in range(1, 100):
        table.now_s = tick * REPEAT_S / 40
        table.attempts.on_frame("w", tokens("r", tick), table.now_s)
    table.attempts.on_frame("v", tokens("r"), table.now_s)
    assert table.cancels == [("w", "r", 1)] * 3 + [("v", "r", 1)]


def test_a_canceled_attempt_has_time_to_end() -> None:
    table = Cancels()
    table.attempts.cancelled("w", Cancel("r", 1), 0.0)
    table.attempts.on_frame("w", tokens("r"), REPEAT_S / 2)
    table.attempts.on_frame("w", Finished("r", 1, 2, True, 1, 0, 1, 1.0), REPEAT_S)
    assert table.cancels == []
    assert not table.attempts._cancelled_s


def test_what_is_remembered_is_bounded() -> None:
    table = Cancels()
    for number in range(dispatcher.MAX_REMEMBERED + 10):
        table.attempts.cancelled("w", Cancel(f"r{number}", 1), 0.0)
    assert len(table.attempts._cancelled_s) == dispatcher.MAX_REMEMBERED
    assert ("w", "r9", 1) not in table.attempts._cancelled_s
