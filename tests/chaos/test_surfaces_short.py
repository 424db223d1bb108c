"""Tool calls, JSON, several choices, Responses and Messages while workers are killed, shortly."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.chaos.plays import KINDS, played_questions
from tests.chaos.run import Plan, run
from tests.chaos.scenarios import SCENARIOS

STREAMED_OF = 3  # one of so many questions of each kind is answered whole
SCENARIO = replace(
    SCENARIOS["surfaces"],
    every_s=0.2,
    callers=2 * len(KINDS),
    asks=partial(played_questions, streamed_of=STREAMED_OF),
)
QUESTIONS = STREAMED_OF * len(KINDS)


async def test_every_kind_of_answer_goes_on_as_it_began(tmp_path: Path) -> None:
    plan = Plan("short", SCENARIO, seed=5, faults=1, distinct=QUESTIONS, kinds=("kill_each_kind",))
    report = await run(plan, tmp_path / "run")
    assert report.offences == []
    assert report.extras["streams_rescued"].keys() == KINDS.keys()
    assert all(report.extras["streams_rescued"].values())
    assert sum(report.extras["rescues_in_arguments_or_json"].values()) > 0
    assert report.ledger_rows == report.accepted
