"""Days of traffic and losses in seconds: what the policy promises, and that the simulator counts right."""

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from fleet.simulation.market import by_second, read_spot
from fleet.simulation.study import Study
from fleet.simulation.workload import Workload, bursty, with_batch
from fleet.simulation.world import Decide, HostedApi, Outcome, SimulatedPool, World
from spillway.cli import app

HOUR_S = 3600
DAYS = 2
SPEED = 2000.0
PERIOD_S = 60


class RarelyDecided(Study, frozen=True):
    """A study whose policies decide every minute instead of every 5 s: that is harder for them, and played sooner."""

    def play(self, decide: Decide) -> Outcome:
        parts = (self.workload, self.pools, self.market, decide)
        return World(*parts, period_s=PERIOD_S, hosted=self.hosted, seed=self.seed).run(self.max_wait_s)


def study_of(market: dict[str, np.ndarray]) -> Study:
    rng = np.random.default_rng(3)
    work = with_batch(bursty(DAYS, 8.0, rng), 0.25, rng)
    pools = (
        SimulatedPool("spot", "spot", 0.92, SPEED, 180.0, 200, tuple(market)),
        SimulatedPool("on-demand", "on-demand", 3.06, SPEED, 180.0, 200),
    )
    return RarelyDecided(work, pools, market, HostedApi(0.6, 2.0))


def steady(machines: int) -> np.ndarray:
    return np.full(DAYS * 24 * HOUR_S, machines)


def test_losing_a_whole_provider_costs_neither_waits_nor_deadlines_nor_much() -> None:
    market = {"aws-a": steady(20), "aws-b": steady(20), "gcp-a": steady(8)}
    for zone in ("aws-a", "aws-b"):
        market[zone][34 * HOUR_S : 40 * HOUR_S] = 0  # in the second day's busiest hours
    study = study_of(market)
    ours, fixed = study.ours(), study.peers()["fixed at peak, on demand"]()
    assert ours.lost_machines > 0
    assert ours.late_share <= 0.001
    assert ours.batch_missed == 0
    least = study.least_usd()  # that of who knows all in advance
    assert least <= ours.usd <= 1.35 * least  # two days are few to learn from; `spillway fleet simulate` plays more
    assert ours.usd < 0.5 * fixed.usd


def test_a_peer_is_made_as_dear_as_ours_where_it_can_be() -> None:
    whole = study_of({"a": steady(40)})
    length_s = 4 * HOUR_S
    work = Workload(whole.workload.tokens[-length_s:], whole.workload.requests[-length_s:], ())
    study = RarelyDecided(work, whole.pools, whole.market, whole.hosted)
    usd = study.peers(0.45)["reactive (60 s)"]().usd
    equal = study.at_equal_cost("reactive (60 s)", usd)
    assert equal.is_equal
    assert abs(equal.outcome.usd - usd) <= 0.01 * usd
    assert not study.at_equal_cost("reactive (60 s)", usd / 10).is_equal


def test_a_published_market_is_read_as_runs(tmp_path: Path) -> None:
    path = tmp_path / "spot.json"
    path.write_text(json.dumps({"gap_seconds": 60, "zones": {"a": [[4, 2], [0, 1]], "b": [[2, 3]]}}))
    market = by_second(read_spot(path), 240, machines=8)
    assert [market["a"][second] for second in (0, 119, 120, 179, 180)] == [8, 8, 0, 0, 8]
    assert market["b"][0] == 4


def test_the_month_of_the_documents() -> None:
    result = CliRunner().invoke(app, ["plan"])
    assert result.exit_code == 0
    for usd in ("84,798", "73,739", "31,500"):
        assert usd in result.output


def test_plan_says_which_option_it_cannot_read() -> None:
    result = CliRunner().invoke(app, ["plan", "--offer", "p5"])
    assert result.exit_code != 0
    assert "--offer p5: must be NAME=USD[/GPUS]" in result.output
