"""The fleet's load scenarios for a few seconds each: whether they work. How well is for ``make chaos``."""

from pathlib import Path

from tests.chaos.load_scenarios import LOAD_SCENARIOS
from tests.chaos.load_scenarios.plan import LoadPlan, run_load
from tests.chaos.report import Report

NO_MATTER_HOW_LATE = 1000.0


async def play(name: str, folder: Path, *, seconds: float, count: int = 0) -> Report:
    plan = LoadPlan(name, seed=5, seconds=seconds, count=count, slack=NO_MATTER_HOW_LATE)
    report = await run_load(LOAD_SCENARIOS[name], plan, folder / "run")
    assert report.offences == []
    assert report.errors == report.difference.lost == report.difference.changed == 0
    assert report.ledger_rows == report.requests > 0
    return report


async def test_a_pool_follows_its_load_and_wakes_from_nothing(tmp_path: Path) -> None:
    report = await play("fleet-steps", tmp_path, seconds=10.0)
    assert report.faults >= 2  # machines that were drained and ended


async def test_a_market_takes_machines_and_controllers_are_killed(tmp_path: Path) -> None:
    report = await play("fleet-spot", tmp_path, seconds=20.0)
    assert report.extras["machines"] > 1


async def test_another_region_serves_alone_and_comes_back_when_it_was_cut_off(tmp_path: Path) -> None:
    report = await play("regions", tmp_path, seconds=2.0, count=1)
    assert report.faults == 3
