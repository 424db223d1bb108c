"""An engine's statistics as they travel in the worker's heartbeats."""

from engine import types
from protocol.job import EngineStats, Histogram


def wire_stats(stats: types.EngineStats, waiting_jobs: int) -> EngineStats:
    """Translate; ``waiting_jobs`` are here and not yet in the engine."""
    counters = stats.counters
    return EngineStats(
        running=stats.running,
        waiting=stats.waiting + waiting_jobs,
        kv_usage=stats.kv_usage,
        prompt_tokens=counters.prompt_tokens,
        generated_tokens=counters.generated_tokens,
        step_tokens=_histogram(stats.step_tokens),
        inter_token_s=_histogram(stats.inter_token_s),
        queried_tokens=counters.queried_tokens,
        cached_tokens=counters.cached_tokens,
        drafts=counters.drafts,
        guessed_tokens=counters.guessed_tokens,
        right_tokens=counters.right_tokens,
        preemptions=counters.preemptions,
    )


def _histogram(counts: types.HistogramCounts) -> Histogram:
    return Histogram(counts.bounds, counts.counts, counts.total)
