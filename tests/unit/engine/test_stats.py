"""The engine's statistics match its work."""

import itertools
import operator
import random
import threading
from collections import defaultdict
from typing import Any

import pytest
from transformers import PreTrainedModel

from engine import GenerationRequest, LLMEngine, SamplingParams
from engine.step_stats import Histogram, SequenceClock, StepStats
from engine.types import EngineStats, HistogramCounts, SequenceTimings
from tests.unit.engine.tiny_models import VOCAB_SIZE, Answer, Answers, collect, llama, make_engine, run

PROMPT = tuple(random.Random(4).choices(range(20, VOCAB_SIZE), k=40))
REPEATING = tuple(random.Random(4).choices(range(20, 26), k=60))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


def request(name: str, prompt: tuple[int, ...] = PROMPT, **params: Any) -> GenerationRequest:
    return GenerationRequest(
        name, prompt, SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "temperature": 0.0} | params)
    )


def numbers(stats: EngineStats) -> list[float]:
    """Return all numbers that must only grow."""
    counters = [getattr(stats.counters, name) for name in stats.counters.__slots__]
    histograms = (stats.step_tokens, stats.inter_token_s)
    return [*counters, *(n for h in histograms for n in (*h.counts, h.total))]


def test_histogram_bounds_belong_to_their_buckets() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.1, 2.0, 2.1):
        histogram.observe(value)
    histogram.observe(3.0, times=4)
    total: Any = pytest.approx(18.7)
    assert histogram.snapshot() == HistogramCounts((1.0, 2.0), (2, 2, 5), total)


def test_counters_are_the_tokens(model: PreTrainedModel) -> None:
    engine = make_engine(model)
    answers = run(engine, request("a"), request("b", (*PROMPT[:20], 25, 26), n=2))
    again = run(engine, request("c"))
    stats = engine.stats()
    assert stats.counters.prompt_tokens == stats.counters.queried_tokens == 40 + 2 * 22 + 40
    assert stats.counters.generated_tokens == sum(len(a.token_ids) for a in (*answers.values(), *again.values())) == 48
    # Blocks of 4: "b" finds 20 of "a", its second choice 20 of the first, "c" all but the last token's block.
    assert stats.counters.cached_tokens == 20 + 20 + 36
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    assert stats.step_tokens.total == stats.counters.computed_tokens
    assert sum(stats.inter_token_s.counts) == 48 - 4  # none before a sequence's first token


def test_without_a_prefix_cache_nothing_is_queried(model: PreTrainedModel) -> None:
    engine = make_engine(model, prefix_cache=False)
    run(engine, request("a"), request("b"))
    counters = engine.stats().counters
    assert (counters.prompt_tokens, counters.queried_tokens, counters.cached_tokens) == (80, 0, 0)


def test_drafts_are_counted_and_a_gap_spans_a_step(model: PreTrainedModel) -> None:
    engine = make_engine(model, draft_tokens=5)
    engine.add_request(request("r", REPEATING, max_tokens=80))
    yields = 0
    while engine.has_unfinished():
        yields += sum(bool(output.token_ids) for output in engine.step())
    stats = engine.stats()
    assert stats.counters.generated_tokens == 80 == yields + stats.counters.right_tokens
    assert 0 < stats.counters.drafts <= stats.counters.guessed_tokens
    assert stats.counters.right_tokens > 0, "nothing repeated itself"
    assert sum(stats.inter_token_s.counts) == yields - 1


def test_load_is_reported_while_it_lasts(model: PreTrainedModel) -> None:
    engine = make_engine(model, max_sequences=2, max_batched_tokens=128)
    for number in range(3):
        engine.add_request(request(f"r{number}", tuple(range(20 + number, 60 + number))))
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (2, 1)
    assert stats.kv_usage == engine._block_pool.used_blocks / engine._block_pool.total_blocks > 0


def test_counters_only_grow_even_seen_from_another_thread(model: PreTrainedModel) -> None:
    """Arrivals, cancellations and preemptions while another thread reads continuously."""
    source = random.Random(3)
    engine = make_engine(model, kv_bytes=32 * 4 * 512, lookahead_tokens=4)
    seen: list[list[float]] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.0005):
            seen.append(numbers(engine.stats()))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for number in range(30):
            engine.add_request(request(f"r{number}", PROMPT[: source.randrange(4, 40)], max_tokens=20))
            engine.step()
            if number % 7 == 0:
                engine.abort(f"r{number - 3}")
        while engine.has_unfinished():
            engine.step()
    finally:
        over.set()
        watcher.join()
    seen.append(numbers(engine.stats()))
    assert engine.counters.preemptions > 0, "there was room for all"
    assert len(seen) > 2
    for before, after in itertools.pairwise(seen):
        assert all(map(operator.le, before, after))


# --- timings of one choice --------------------------------------------------------------------------------------------


class Clock:
    """A clock of one second per step."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def timed(engine: LLMEngine, clock: Clock, answers: Answers) -> dict[str, list[SequenceTimings]]:
    reported: dict[str, list[SequenceTimings]] = defaultdict(list)
    while engine.has_unfinished():
        clock.now_s += 1
        outputs = engine.step()
        collect(answers, outputs)
        for output in outputs:
            if output.timings is not None:
                reported[output.request_id].append(output.timings)
    return reported


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("engine.engine.time", clock)
    monkeypatch.setattr("engine.scheduler.time", clock)
    monkeypatch.setattr("engine.step_stats.time", clock)
    return clock


def seconds(timings: SequenceTimings) -> tuple[float, float, float]:
    return timings.queue_ms / 1000, timings.prefill_ms / 1000, timings.decode_ms / 1000


def test_phases_follow_each_other(model: PreTrainedModel, clock: Clock) -> None:
    """Prompts of 40 tokens, 24 per step: the first sequence begins in step 1 and has its first token in step 2."""
    engine = make_engine(model, max_sequences=1)
    engine.add_request(request("first", max_tokens=5))
    engine.add_request(request("second", PROMPT[::-1], max_tokens=1))
    reported = timed(engine, clock, defaultdict(Answer))
    assert [seconds(timings) for timings in reported["first"]] == [(1, 1, 0), (1, 1, 4)]
    assert [seconds(timings) for timings in reported["second"]] == [
        (7, 1, 0)
    ]  # steps 7 and 8; its first token is its last


def test_canceled_requests_report_their_timings(model: PreTrainedModel, clock: Clock) -> None:
    engine = make_engine(model, max_sequences=1)
    for name in ("running", "waiting"):
        engine.add_request(request(name))
    for _ in range(4):
        clock.now_s += 1
        engine.step()
    engine.abort("running")
    engine.abort("waiting")
    reported = {output.request_id: output.timings for output in engine.step() if output.timings is not None}
    assert seconds(reported["running"]) == (1, 1, 2)
    assert seconds(reported["waiting"]) == (4, 0, 0)


def test_preemption_counts_in_its_phase_and_as_a_gap(model: PreTrainedModel, clock: Clock) -> None:
    engine = make_engine(model, kv_bytes=24 * 4 * 512, lookahead_tokens=4, prefix_cache=False)  # 96 tokens
    for name, prompt in {"old": PROMPT[:20], "new": PROMPT[20:]}.items():
        engine.add_request(request(name, prompt, max_tokens=40))
    reported = timed(engine, clock, defaultdict(Answer))
    assert engine.counters.preemptions == reported["new"][-1].preemptions > 0 == reported["old"][-1].preemptions
    assert seconds(reported["old"][-1])[2] == 39
    assert seconds(reported["new"][-1])[2] > 39 + 1
    gaps = engine.stats().inter_token_s
    assert sum(gaps.counts) == 78
    assert gaps.total == (reported["old"][-1].decode_ms + reported["new"][-1].decode_ms) / 1000
    assert sum(gaps.counts[gaps.bounds.index(1.0) + 1 :]) == engine.counters.preemptions


def test_a_sequence_that_waits_a_step_has_its_own_gap() -> None:
    stats, one, other = StepStats(), SequenceClock(), SequenceClock()
    for now_s, who in ((1.0, [one, other]), (2.0, [one, other]), (3.0, [one]), (6.0, [one, other])):
        stats.record_tokens(who, now_s)
    counts = stats.inter_token_s.snapshot()
    assert (sum(counts.counts), counts.total) == (5, 1 + 1 + 1 + 3 + 4)
    assert (one.first_token_s, one.last_token_s) == (1.0, 6.0)
