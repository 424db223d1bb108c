"""What is kept of all connections together; what a single one may do is tested at the socket."""

import asyncio
import resource

import pytest

from gateway.api.connections import OTHER_FILES, Deadlines, files_allow
from gateway.settings import ConnectionSettings

LONGEST_USUAL_S = 600  # Google's load balancers


def test_idle_connections_outlive_those_of_clients_and_proxies() -> None:
    """Equal would be worst: the client's next request crosses the closing."""
    assert ConnectionSettings().keep_alive_s > LONGEST_USUAL_S


def test_as_many_files_as_connections_need_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = OTHER_FILES + 300
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
        assert files_allow(10) == 10
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft
        assert files_allow(400) == 400
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == OTHER_FILES + 400
        assert not caplog.records
        if before[1] != resource.RLIM_INFINITY:
            assert files_allow(before[1]) == before[1] - OTHER_FILES
            assert "so at most" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_what_is_late_is_told_in_its_order_and_the_rest_is_left_alone() -> None:
    late: list[str] = []
    deadlines = Deadlines(0.05, late.append)
    for thing in ("a", "b", "c"):
        deadlines.add(thing)
    deadlines.discard("b")
    assert deadlines.first() == "a"
    async with asyncio.timeout(20):
        while len(late) < 2:
            await asyncio.sleep(0.01)
        deadlines.add("d")  # the timer runs again
        while len(late) < 3:
            await asyncio.sleep(0.01)
    assert late == ["a", "c", "d"]
    assert deadlines.first() is None
