"""A small batch under a few kills; ``make chaos SCENARIO=batch-kills`` has ten thousand lines and many."""

from dataclasses import replace
from pathlib import Path

from tests.chaos.load_scenarios import LOAD_SCENARIOS, batch_kills
from tests.chaos.load_scenarios.plan import LoadPlan, run_load
from tests.chaos.system import Shape

LINES = 100
KILLS = {"worker": 2, "feeder": 1, "queue": 1}
SHAPE = Shape(
    workers=2,
    gateways=2,
    inter_token_s=0.05,
    # Few lines at a time: the batch must last until its last strike, however long a busy machine takes for each.
    batches={"lease_s": 0.5, "commit_s": 0.2, "poll_s": 0.1, "max_open_lines": 16},
)  # with SQLite; the long way has PostgreSQL


async def test_every_line_once_whoever_dies(tmp_path: Path) -> None:
    scenario = replace(LOAD_SCENARIOS["batch-kills"], shape=SHAPE, play=batch_kills.play(KILLS))
    report = await run_load(scenario, LoadPlan("batch-kills", seed=5, seconds=0, count=LINES), tmp_path / "run")
    assert report.offences == []
    assert report.extras["kills"] == KILLS
    assert report.errors == report.difference.lost == report.difference.repeated == report.difference.changed == 0
    assert report.extras["epochs"] > KILLS["feeder"]
