"""Tool calls, JSON, several choices, Responses and Messages while workers are killed, shortly."""

from dataclasses import replace
from pathlib import Path

from tests.chaos.plays import KINDS, STREAMED_OF
from tests.chaos.run import Plan, run
from tests.chaos.scenarios import SCENARIOS

SCENARIO = replace(SCENARIOS["surfaces"], every_s=0.2, callers=21)
QUESTIONS = STREAMED_OF * len(KINDS)  # one of each kind is answered whole


async def test_every_kind_of_answer_goes_on_as_it_began(tmp_path: Path) -> None:
    plan = Plan("short", SCENARIO, seed=5, faults=1, distinct=QUESTIONS, kinds=("kill_each_kind",))
    report = await run(plan, tmp_path / "run")
    assert report.offences == []
    assert report.extras["streams_rescued"].keys() == KINDS.keys()
    assert all(report.extras["streams_rescued"].values())
    assert sum(report.extras["rescues_in_arguments_or_json"].values()) > 0
    assert report.ledger_rows == report.accepted
