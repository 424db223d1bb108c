"""Responses in the background while a gateway and a worker are killed."""

from dataclasses import replace
from pathlib import Path

from tests.chaos.run import Plan, run
from tests.chaos.scenarios import SCENARIOS

KINDS = ("gateway", "kill")
SCENARIO = replace(SCENARIOS["background"], every_s=0.2, callers=6)


async def test_no_event_is_lost_or_repeated(tmp_path: Path) -> None:
    plan = Plan("short", SCENARIO, seed=5, faults=len(KINDS), distinct=8, kinds=KINDS)
    report = await run(plan, tmp_path / "run")
    assert report.offences == []
    assert report.cut  # readers were cut off, and read on elsewhere
    assert report.attempts_max > 1
    # A gateway may die before it has said that a response has begun: it has a row, too, and its caller asks again.
    assert report.accepted <= report.ledger_rows <= report.accepted + report.cut
