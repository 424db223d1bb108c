"""Shutdown and listening of the gateway process."""

import asyncio
import socket

import pytest

from gateway import main
from tests.waiting import HANGS_S


async def test_a_task_that_lost_a_cancellation_is_canceled_again() -> None:
    lost = 0

    async def forgetful() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if lost == 2:
                    raise
                lost += 1

    tasks = [asyncio.create_task(forgetful()), asyncio.create_task(asyncio.sleep(60))]
    await asyncio.sleep(0)
    async with asyncio.timeout(HANGS_S):
        await main._end(tasks)  # type: ignore[arg-type]
    assert all(task.cancelled() for task in tasks)
    assert lost == 2


@pytest.mark.parametrize(
    ("host", "reached_at"),
    [("::", ("127.0.0.1", "::1")), ("127.0.0.1", ("127.0.0.1",)), ("0.0.0.0", ("127.0.0.1",)), ("::1", ("::1",))],
)
def test_the_gateway_listens_on_ipv4_and_ipv6(host: str, reached_at: tuple[str, ...]) -> None:
    with main.listen(host, 0) as listener:
        for address in reached_at:
            with socket.create_connection((address, listener.getsockname()[1])):
                pass
