"""Verdicts on slow nodes, second by second, with a fake clock."""

import itertools
from typing import Any

import pytest

from engine.types import EngineCounters, EngineStats, HistogramCounts
from pool_worker.settings import WatchSettings
from pool_worker.watch.pace import Pace, StartFigures

KV_TOKENS = 100_000
START = StartFigures(tpot_s=0.010, ttft_s=0.100)


class Node:
    """An engine whose work is scripted second by second."""

    def __init__(self, **settings: Any) -> None:
        self.pace = Pace(WatchSettings(**settings), KV_TOKENS)
        self.seconds = itertools.count()
        self.gaps, self.total_s, self.prompt_tokens = 0, 0.0, 0
        self.peers: list[float] = []

    def works(
        self, seconds: int, tpot_s: float, running: int = 1, context: int = 200, prompt_tokens: int = 0
    ) -> str | None:
        """Give every sequence tokens at this pace; return why the node should then leave."""
        for _ in range(seconds):
            gaps = round(running / tpot_s) if running else 0
            self.gaps += gaps
            self.total_s += gaps * tpot_s
            self.prompt_tokens += prompt_tokens
            stats = EngineStats(
                running=running,
                waiting=0,
                kv_usage=running * context / KV_TOKENS,
                counters=EngineCounters(prompt_tokens=self.prompt_tokens),
                step_tokens=HistogramCounts((), (0,), 0.0),
                inter_token_s=HistogramCounts((), (self.gaps,), self.total_s),
            )
            reason = self.pace.judge(float(next(self.seconds)), stats, self.peers)
            if reason is not None:
                return reason
        return None


def measured(**settings: object) -> Node:
    node = Node(**settings)
    node.pace.measured(START, [(1, 272, 0.010), (4, 272, 0.012), (16, 272, 0.020)])
    return node


def test_a_node_that_stays_slow_leaves_and_says_why() -> None:
    node = measured(slow_for_s=60.0)
    assert node.works(100, 0.011) is None
    reason = node.works(200, 0.030)
    assert reason is not None
    assert "times as long as normal at this load, above 2.0" in reason
    assert 0.009 < START.tpot_s < 0.03
    assert node.pace.slowdown == pytest.approx(3.0, rel=0.1)
    assert next(node.seconds) < 100 + 60 + 60  # the window fills first, and then the slowdown lasts


def test_a_short_slowdown_is_no_reason() -> None:
    node = measured(slow_for_s=60.0)
    for _ in range(5):
        assert node.works(40, 0.030) is None
        assert node.works(60, 0.010) is None


def test_a_large_batch_is_not_a_fault() -> None:
    """Four times as slow as a single request, as this engine always is with such a batch."""
    node = measured(slow_for_s=60.0, max_tpot_ms=15.0)
    for _ in range(3):
        assert node.works(100, 0.040, running=64) is None
        assert node.works(100, 0.010, running=1) is None
    assert node.works(200, 0.100, running=64) is not None  # slow even for such a batch


@pytest.mark.parametrize("load", [{"context": 30_000}, {"prompt_tokens": 2000}], ids=str)
def test_long_contexts_and_concurrent_prefills_are_not_a_fault(load: dict[str, int]) -> None:
    node = measured(slow_for_s=60.0)
    assert node.works(300, 0.030, **load) is None
    assert node.works(300, 0.090, **load) is not None


def test_the_normal_is_the_fastest_stretch_not_the_first() -> None:
    """The first requests of a kind may compile kernels."""
    node = measured(slow_for_s=60.0)
    assert node.works(20, 0.500, running=32) is None
    assert node.works(100, 0.020, running=32) is None
    assert node.works(200, 0.060, running=32) is not None


def test_a_limit_in_milliseconds_applies_to_a_single_request() -> None:
    """A limit of 15 ms for a single request allows this engine half as much again, at every load."""
    node = measured(slow_for_s=60.0, max_tpot_ms=15.0)
    assert node.works(200, 0.028, running=16) is None
    assert node.works(200, 0.032, running=16) is not None


def test_an_idle_node_is_neither_slow_nor_recovered() -> None:
    node = measured(slow_for_s=60.0)
    assert node.works(45, 0.030) is None  # slow for part of that time
    assert node.works(1000, 0.0, running=0) is None
    assert node.works(55, 0.030) is not None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"max_tpot_ms": 10.5, "max_ttft_ms": 105.0}, None),
        ({"max_tpot_ms": 9.5}, "10.0 ms for a single request, above max_tpot_ms = 9.5"),
        ({"max_ttft_ms": 95.0}, "100.0 ms for a single request, above max_ttft_ms = 95"),
    ],
)
def test_a_node_may_be_too_slow_from_the_start(settings: dict[str, float], reason: str | None) -> None:
    assert measured(**settings).pace.too_slow_at_the_start() == reason


def test_the_pools_median_counts_if_there_are_peers() -> None:
    node = measured(slow_for_s=60.0)
    node.peers = [3.0]
    assert node.works(200, 0.010) is None  # one peer is not a pool
    node.peers = [3.0, 4.0, 30.0]
    reason = node.works(200, 0.010)
    assert reason is not None
    assert "10.0 ms per token for a single request, while the pool's median is 4.0 ms" in reason


def test_a_node_with_few_tokens_is_judged_by_them() -> None:
    assert measured(slow_for_s=60.0).works(200, 0.9) is not None


def test_first_tokens_are_judged_by_the_length_of_their_prompts() -> None:
    node = measured(slow_for_s=60.0)

    def asks(seconds: int, prefill_s: float, prompt_tokens: int) -> str | None:
        for _ in range(seconds):
            node.pace.first_token(float(next(node.seconds)), prefill_s, prompt_tokens)
            reason = node.works(1, 0.010)
            if reason is not None:
                return reason
        return None

    assert asks(50, 0.1, 250) is None
    assert asks(50, 4.0, 10_000) is None
    assert asks(50, 0.1, 250) is None
    reason = asks(200, 0.3, 250)
    assert reason is not None
    assert reason.startswith("first tokens take 3.0 times")


def test_old_samples_are_dropped() -> None:
    node = measured(slow_for_s=60.0)
    for running in range(1, 500):
        node.works(2, 0.010, running=running, context=running * 60, prompt_tokens=running**2)
    assert len(node.pace._tpot.classes) < 100
    assert len(node.pace._tpot.judged) <= 31
