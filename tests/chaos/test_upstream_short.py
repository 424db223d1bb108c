"""Each thing that an inference server does wrong, once, and a pool replaced under load; with replays."""

from pathlib import Path

from tests.chaos.run import Plan, run
from tests.chaos.scenarios import SCENARIOS, Scenario
from tests.chaos.servers import ServerSpec
from tests.chaos.system import Shape
from tests.chaos.upstream_faults import WRONGS

SWAP = Scenario(
    "one pool replaced by another, and back",
    {"swap": 1},
    1,
    0.1,
    Shape(
        workers=0,
        servers=(ServerSpec("old", "vllm", real=False), ServerSpec("new", "llamacpp", real=False, side_cars=2)),
        standing_by="new",
    ),
    callers=6,
)


async def test_whatever_a_server_does_ends_as_the_caller_would_wish(tmp_path: Path) -> None:
    plan = Plan("upstream", SCENARIOS["upstream"], seed=3, faults=len(WRONGS), distinct=8)
    report = await run(plan, tmp_path / "run")
    assert report.offences == []
    assert len(report.endings) == len(WRONGS)
    assert report.extras["listed_faults_ended_as_wished"] == "16 of 16"
    assert report.attempts_max > 1
    assert report.ledger_rows == report.accepted


async def test_a_pool_is_replaced_under_load(tmp_path: Path) -> None:
    report = await run(Plan("swap", SWAP, seed=3, faults=1, distinct=8), tmp_path / "run")
    assert report.offences == []
    assert report.faults == 2  # the swap, and one of the new pool's workers killed
    assert report.gaps_ms["swap-kill"]
