"""Tool calls, JSON, several choices, Responses and Messages while workers are killed, shortly."""

from dataclasses import replace
from pathlib import Path

from tests.chaos.plays import KINDS
from tests.chaos.run import Plan, run
from tests.chaos.scenarios import SCENARIOS

KILLS = 8
SCENARIO = replace(SCENARIOS["surfaces"], every_s=0.2, callers=36, rescued_per_fault=1 / KILLS)


async def test_every_kind_of_answer_goes_on_as_it_began(tmp_path: Path) -> None:
    plan = Plan("short", SCENARIO, seed=5, faults=KILLS, distinct=6 * len(KINDS))
    report = await run(plan, tmp_path / "run")
    assert report.offences == []
    assert report.extras["streams_rescued"].keys() == KINDS.keys()
    assert sum(report.extras["rescues_in_arguments_or_json"].values()) > 0
    assert report.ledger_rows == report.accepted
