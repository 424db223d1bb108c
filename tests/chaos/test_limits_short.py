"""The storm at the limits, for a moment. The whole of it, with a third gateway that is killed, is ``make limits``."""

from pathlib import Path

from tests.chaos.limits import Limits, run
from tests.waiting import HANGS_S

LIMITS = Limits(requests=100, tokens=6_000, concurrent=20, budget_tokens=1_600)


async def test_limits_are_exact_over_two_gateways(tmp_path: Path) -> None:
    findings = await run(
        tmp_path / "run",
        seed=3,
        seconds=1.0,
        count=40,
        kill=False,
        gateways=2,
        callers=2 * LIMITS.concurrent,
        limits=LIMITS,
        limits_s=HANGS_S,  # a busy machine's queue server is not away
    )
    assert findings.offences == []
