"""Webhooks where every part has its own credentials: gateways publish, a ledger process takes, delivers and tells."""

import asyncio

from db.engine import create_engine
from ledger.webhooks import main
from ledger.webhooks.events import publish_finished
from ledger.webhooks.state import StateView
from protocol import subjects
from tests.integration.credentials.conftest import Queue
from tests.integration.ledger.webhooks.conftest import (  # noqa: F401
    ACTOR,
    PEPPER,
    TEAM,
    StartReceiver,
    endpoints_of,
    settings,
    start_receiver,
)
from tests.waiting import until


async def test_each_part_may_do_its_own(queue: Queue, sqlite_url: str, start_receiver: StartReceiver) -> None:  # noqa: F811
    gateway, ledger = await queue.connect("gateway"), await queue.connect("ledger")
    engine, stopping, view = create_engine(sqlite_url), asyncio.Event(), StateView()
    receiver = await start_receiver()
    await endpoints_of(engine).create(TEAM, receiver.url, ["batch.completed"], ACTOR)
    await view.start(gateway)
    heard: list[bytes] = []
    await ledger.listen(subjects.BUDGET_REFUSED, lambda message: heard.append(message.data))
    task = asyncio.create_task(main.run(ledger, engine, stopping, settings(), PEPPER))
    for number, bus in enumerate((gateway, ledger)):
        await publish_finished(bus, TEAM, "batch.completed", f"batch_{number}", created_unix_s=1_800_000_000)
    await gateway.publish(subjects.BUDGET_REFUSED, b"key_x")
    await until(lambda: len(receiver.received) == 2 and heard == [b"key_x"])
    await until(lambda: list(view.families()))
    stopping.set()
    await task
    await engine.dispose()
