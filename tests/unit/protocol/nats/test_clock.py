import logging
import time

import pytest

from protocol.nats import clock as clocks
from protocol.nats.clock import ServerClock


class Server:
    """A server that replies with its time after a delay, which may differ in both directions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0  # true time
        self.ahead_s = 1000.0  # of its clock, relative to the true time
        self.ways_s: list[tuple[float, float]] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    async def ask(self) -> float:
        there_s, back_s = self.ways_s.pop(0) if self.ways_s else (0.0, 0.0)
        self.now_s += there_s
        reply_s = self.now_s + self.ahead_s
        self.now_s += back_s
        return reply_s


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


async def test_the_fastest_reply_sets_the_time(server: Server) -> None:
    clock = ServerClock(server.ask, lambda: 7.0)
    assert (clock.now_s(), clock.skew_s) == (7.0, 0.0)  # not measured yet
    server.ways_s = [(0.0, 1.0), (0.01, 0.0), (0.4, 0.0)]
    await clock.measure()
    assert clock.now_s() == pytest.approx(server.now_s + 1000, abs=0.006)
    server.ways_s = [(2.0, 0.0)] * 3  # slow replies change nothing
    await clock.measure()
    assert clock.now_s() == pytest.approx(server.now_s + 1000, abs=0.006)


async def test_another_server_may_have_another_time(server: Server) -> None:
    clock = ServerClock(server.ask, lambda: 0.0)
    await clock.measure()
    server.ahead_s += 3
    await clock.measure()
    assert clock.now_s() == server.now_s + 1003


async def test_a_wrong_clock_is_logged_periodically(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    clock = ServerClock(server.ask, lambda: server.now_s + 1000 - 2.5)
    for _ in range(4):
        await clock.measure()
        server.now_s += clocks.WARN_PERIOD_S / 2
    assert clock.skew_s == pytest.approx(-2.5)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "2.5 s behind the queue server's" in caplog.text


async def test_a_correct_clock_is_not_logged(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    await ServerClock(server.ask, lambda: server.now_s + 1000.9).measure()
    assert not caplog.records
