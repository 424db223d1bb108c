"""The page Fleet: sizes, reasons, and what losses cost."""

from sqlalchemy.ext.asyncio import AsyncEngine

from console.dashboard.pages.fleet import fleet
from console.dashboard.view import make_view
from db.engine import create_engine
from db.tables import Decision
from fleet.machine import Machine, State
from fleet.machine_store import MachineStore
from ledger.store import store_records
from protocol.usage import UsageRecord
from tests.usage_records import attempt_record, request_record

NOON = 1_800_000_000_000 // 3_600_000 * 3_600_000
HOUR = 3_600_000


def machine(name: str, state: State, served: int, over: int | None = None) -> Machine:
    return Machine(
        name, "spot", "a", state, served - 60_000, f"i-{name}", f"w-{name}", served - 50_000, served, None, over, "why"
    )


async def _fill(engine: AsyncEngine) -> None:
    store = MachineStore(engine)
    for one in (
        machine("m-1", State.SERVING, NOON),
        machine("m-2", State.LOST, NOON, NOON + HOUR // 2),
        machine("m-3", State.LOST, NOON, NOON + 2 * HOUR),
        machine("m-4", State.GONE, NOON - 50 * HOUR, NOON - 49 * HOUR),
    ):
        await store.add(one)
    await store.add_decisions(
        [
            Decision(NOON - 30 * HOUR, "spot", 1, 0, 0, "long ago"),
            Decision(NOON, "spot", 3, 1, 0, "it is noon"),
            Decision(NOON + HOUR, "spot", 2, 2, 0, "it is one"),
        ]
    )
    records: list[UsageRecord] = []
    for number, outcome in enumerate(("ok", "ok", "failed")):
        records.append(request_record(f"r{number}", outcome=outcome, attempts=2))
        records.append(
            attempt_record(f"r{number}", 1, worker_id="w-m-2", outcome="failed", started_unix_ms=NOON, total_ms=100.0)
        )
        resumed = {"worker_id": "w-m-1", "started_unix_ms": NOON + 110 + number, "ttft_ms": 20.0}
        records.append(attempt_record(f"r{number}", 2, **resumed))
    records.append(request_record("other"))
    records.append(attempt_record("other", 1, worker_id="w-m-2"))  # ended before the loss
    await store_records(engine, records)


async def test_sizes_reasons_and_what_losses_cost(database_url: str) -> None:
    engine = create_engine(database_url)
    try:
        await _fill(engine)
        view = make_view({"since": str(NOON - HOUR), "until": str(NOON + 3 * HOUR)}, {})
        async with engine.connect() as connection:
            page = await fleet(connection, view)
    finally:
        await engine.dispose()
    [size] = page["pools"]
    assert (size.pool, size.decided, size.serving, size.lost, size.reason) == ("spot", 2, 1, 2, "it is one")
    costs = {loss.machine.machine_id: loss.cost for loss in page["losses"]}
    assert costs == {"m-2": "3 requests, 32.0 ms, 1 of them failed", "m-3": "0 requests"}
    assert [decision.reason for decision in page["decisions"]] == ["it is one", "it is noon"]
    serving, decided = page["chart"].lines
    steps = {step.since_unix_ms: number for number, step in enumerate(page["chart"].steps)}
    assert serving.values[steps[NOON]] == 3
    assert serving.values[steps[NOON + 2 * HOUR]] == 1
    assert decided.values[steps[NOON - HOUR]] == 1  # from long ago
    assert decided.values[steps[NOON]] == 3
    assert decided.values[-1] == 2
