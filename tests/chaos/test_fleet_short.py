"""A pool that the fleet controller resizes. Spot markets and lost regions are scenarios of ``make chaos``."""

from dataclasses import replace
from pathlib import Path

from tests.chaos.load_scenarios import LOAD_SCENARIOS
from tests.chaos.load_scenarios.fleet import FLEET, STEPS_SHAPE
from tests.chaos.load_scenarios.plan import LoadPlan, run_load

NO_MATTER_HOW_LATE = 1000.0
STEPS = STEPS_SHAPE.worker_settings
SHAPE = replace(
    STEPS_SHAPE,
    fleet={**FLEET, "idle_s": 4.0, "cool_down_s": 4.0},
    worker_settings={**STEPS, "fleet": {**STEPS["fleet"], "max_workers": 2}},
)


async def test_a_pool_follows_its_load_and_wakes_from_nothing(tmp_path: Path) -> None:
    scenario = replace(LOAD_SCENARIOS["fleet-steps"], shape=SHAPE)
    plan = LoadPlan("fleet-steps", seed=5, seconds=5.0, count=0, slack=NO_MATTER_HOW_LATE)
    report = await run_load(scenario, plan, tmp_path / "run")
    assert report.offences == []
    assert report.errors == report.difference.lost == report.difference.changed == 0
    assert report.ledger_rows == report.requests > 0
    assert report.faults >= 2  # machines that were drained and ended
