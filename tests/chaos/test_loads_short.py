"""The load scenarios for a few seconds each: whether they work. How well is for ``make chaos`` on a quiet machine."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.load_scenarios import LOAD_SCENARIOS
from tests.chaos.load_scenarios.batch_beside import batch_beside
from tests.chaos.load_scenarios.disconnect import disconnect
from tests.chaos.load_scenarios.overflow import overflow_shape
from tests.chaos.load_scenarios.plan import LoadPlan, LoadScenario, Stage, run_load
from tests.chaos.load_scenarios.shares import BUSY, QUIET, backlogs, fair
from tests.chaos.load_scenarios.spike import spike
from tests.chaos.system import Shape

NO_MATTER_HOW_LATE = 1000.0  # bounds on times, and on shares of a time, mean nothing where other tests run beside
SMALL = Shape(workers=2, max_sequences=6, inter_token_s=0.025, tenants={BUSY: 1.0, QUIET: 1.0})


async def _play_all(stage: Stage) -> None:
    """One system for all: most of the time goes into starting it."""
    plays = ((spike, 0.15, 0), (fair, 0.5, 0), (backlogs, 0.0, 36), (batch_beside, 2.0, 0), (disconnect, 0.0, 40))
    for play, seconds, count in plays:
        plan = LoadPlan(play.__name__, seed=5, seconds=seconds, count=count, slack=NO_MATTER_HOW_LATE)
        await play(Stage(stage.system, stage.callers, plan, stage.report))


async def test_spikes_shares_and_hang_ups(tmp_path: Path) -> None:
    scenario = LoadScenario("all on one", SMALL, _play_all, 0)
    report = await run_load(scenario, LoadPlan("short", seed=5, seconds=0), tmp_path / "run")
    assert report.offences == []
    assert report.extras["queued_left"] == 20
    assert report.extras["running_left"] > 0
    assert report.extras["busy_began"] + report.extras["quiet_began"] == 36
    assert report.errors == report.difference.lost == report.difference.changed == 0


async def test_the_dear_pool_works_only_while_the_cheap_one_is_gone(tmp_path: Path) -> None:
    plan = LoadPlan("tiers", seed=5, seconds=0.5, count=1, slack=NO_MATTER_HOW_LATE)
    report = await run_load(LOAD_SCENARIOS["tiers"], plan, tmp_path / "run")
    assert report.offences == []
    assert report.extras["dear_jobs_in_health"] == 0
    assert report.extras["attempts_by_pool"]["dear"] >= report.extras["cut_streams"] > 0


async def test_nobodys_prompt_leaves_who_has_not_said_so_and_a_cap_is_kept(tmp_path: Path) -> None:
    scenario = replace(LOAD_SCENARIOS["overflow"], shape=overflow_shape(cap_calls=60))
    plan = LoadPlan("overflow", seed=5, seconds=2.0, count=1, slack=NO_MATTER_HOW_LATE)
    report = await run_load(scenario, plan, tmp_path / "run")
    assert report.offences == []
    assert report.errors == report.difference.lost == report.difference.changed == 0
    assert report.extras["hosted_calls"] > report.extras["went_on_at_the_api"] > 0
    assert report.extras["prompts_that_must_stay"] > 0
    assert report.extras["usd_billed"] <= report.extras["usd_in_account"] <= report.extras["usd_cap"]


@pytest.mark.parametrize("name", ["sql-stopped", "sql-locked"])
async def test_nobody_notices_that_sql_is_away(name: str, tmp_path: Path) -> None:
    plan = LoadPlan(name, seed=5, seconds=3.0, count=20, slack=NO_MATTER_HOW_LATE)
    report = await run_load(LOAD_SCENARIOS[name], plan, tmp_path / "run")
    assert report.offences == []
    assert report.ledger_rows == report.requests == report.accepted > report.extras["requests_during"] > 0
    assert report.extras["backlog_messages_during"] > report.extras["backlog_messages_before"]
    assert report.extras["owed_nano_usd"] == report.extras["spent_nano_usd"] > 0
