"""The storm at the limits, for a moment. The whole of it, with a killed gateway, is ``make limits``."""

from pathlib import Path

from tests.chaos.limits import run


async def test_limits_are_exact_over_three_gateways(tmp_path: Path) -> None:
    # On a busy machine an answer of the queue server may take longer than the second that is the default.
    findings = await run(tmp_path / "run", seed=3, seconds=1.0, count=50, kill=False, limits_s=10.0)
    assert findings.offences == []
