"""SQL away for a few seconds. The other loads run in ``make chaos``, each as a scenario, on a quiet machine."""

from dataclasses import replace
from pathlib import Path

from tests.chaos.load_scenarios import LOAD_SCENARIOS
from tests.chaos.load_scenarios.plan import LoadPlan, run_load
from tests.waiting import HANGS_S

SCENARIO = LOAD_SCENARIOS["sql-stopped"]
# A busy machine's queue server is not away: limits are told as late as that.
PATIENT = replace(SCENARIO, shape=replace(SCENARIO.shape, gateway_timeouts={"limits_s": HANGS_S}))
NO_MATTER_HOW_LATE = 1000.0  # bounds on times mean nothing where other tests run beside


async def test_nobody_notices_that_sql_is_away(tmp_path: Path) -> None:
    plan = LoadPlan("sql-stopped", seed=5, seconds=3.0, count=20, slack=NO_MATTER_HOW_LATE)
    report = await run_load(PATIENT, plan, tmp_path / "run")
    assert report.offences == []
    assert report.ledger_rows == report.requests == report.accepted > report.extras["requests_during"] > 0
    assert report.extras["backlog_messages_during"] > report.extras["backlog_messages_before"]
    assert report.extras["owed_nano_usd"] == report.extras["spent_nano_usd"] > 0
