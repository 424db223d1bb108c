from gateway.dispatch import unowned_attempts as orphans_module
from gateway.dispatch.unowned_attempts import REPEAT_S, UnownedAttempts
from protocol.messages import Accepted, Cancel, Finished, Frame, Tokens


def tokens(request_id: str, seq: int = 1) -> Frame:
    return Tokens(request_id, 1, seq, 0, (1,), "x")


class Told:
    """Make a table of unowned attempts and the list of workers that were told to stop."""

    def __init__(self) -> None:
        self.cancels: list[tuple[str, str, int]] = []
        self.now_s = 0.0
        self.orphans = UnownedAttempts(self._cancel)

    def _cancel(self, worker_id: str, cancel: Cancel) -> None:
        self.cancels.append((worker_id, cancel.request_id, cancel.attempt))
        self.orphans.told(worker_id, cancel, self.now_s)


def test_each_is_told_and_again_while_it_goes_on() -> None:
    told = Told()
    told.orphans.on_frame("w", Accepted("r", 1, 0, "w", "p", "p", "r", 0.0), 0.0)
    for tick in range(1, 100):
        told.now_s = tick * REPEAT_S / 40
        told.orphans.on_frame("w", tokens("r", tick), told.now_s)
    told.orphans.on_frame("v", tokens("r"), told.now_s)
    assert told.cancels == [("w", "r", 1)] * 3 + [("v", "r", 1)]


def test_what_was_cancelled_already_has_time_to_end() -> None:
    told = Told()
    told.orphans.told("w", Cancel("r", 1), 0.0)
    told.orphans.on_frame("w", tokens("r"), REPEAT_S / 2)
    told.orphans.on_frame("w", Finished("r", 1, 2, True, 1, 0, 1, 1.0), REPEAT_S)
    assert told.cancels == []
    assert not told.orphans._told_s


def test_what_is_remembered_is_bounded() -> None:
    told = Told()
    for number in range(orphans_module.MAX_REMEMBERED + 10):
        told.orphans.told("w", Cancel(f"r{number}", 1), 0.0)
    assert len(told.orphans._told_s) == orphans_module.MAX_REMEMBERED
    assert ("w", "r9", 1) not in told.orphans._told_s
