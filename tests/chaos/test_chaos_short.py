"""The chaos suite in half a minute: some of every fault that matters most. ``make chaos`` is the long way."""

from pathlib import Path

from tests.chaos.run import Plan, run
from tests.chaos.scenarios import Scenario
from tests.chaos.system import Shape

KINDS = (*["kill"] * 3, "drain", "cut", "freeze", "nats")
SCENARIO = Scenario("some of everything", {}, len(KINDS), every_s=0.1, shape=Shape(proxied=True), callers=8)


async def test_callers_notice_no_fault(tmp_path: Path) -> None:
    plan = Plan("short", SCENARIO, seed=3, faults=len(KINDS), distinct=12, kinds=KINDS)
    report = await run(plan, tmp_path / "run")
    assert report.offences == []
    assert report.faults == len(KINDS)
    assert report.gaps_ms.keys() >= {"kill", "freeze", "nats"}  # streams were struck, and went on
    assert report.attempts_max > 1
    assert report.ledger_rows == report.accepted
