"""Each thing that an inference server does wrong, once, by replays."""

from dataclasses import replace
from pathlib import Path

from tests.chaos.run import Plan, run
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.upstream_faults import WRONGS

SCENARIO = replace(SCENARIOS["upstream"], callers=4)


async def test_whatever_a_server_does_ends_as_the_caller_would_wish(tmp_path: Path) -> None:
    plan = Plan("upstream", SCENARIO, seed=3, faults=len(WRONGS), distinct=8)
    report = await run(plan, tmp_path / "run")
    assert report.offences == []
    assert len(report.endings) == len(WRONGS)
    assert report.extras["listed_faults_ended_as_wished"] == "16 of 16"
    assert report.attempts_max > 1
    assert report.ledger_rows == report.accepted
