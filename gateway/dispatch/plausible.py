"""Bounds on what a worker may report: a stolen or broken one must not spoil a record.

Workers are machines of others, so nothing that they say of an attempt is taken as it comes where something hangs on it:
tokens are bounded by what was asked for and heard (``choices``, ``attempts``), the rest here.
"""

from typing import Final

from gateway.dispatch.choices import Choices
from protocol.job import Accepted, Finished, Timings

MAX_NAME_CHARS: Final = 255
SLACK_S: Final = 1.0  # of timings: two clocks run at different speeds
MAX_PREEMPTIONS: Final = 1_000_000
# Others' tokenizers cut texts otherwise than ours, and APIs put words of their own before a prompt.
COUNT_FACTOR: Final = 4
COUNT_SLACK: Final = 4096


def why_implausible(frame: Accepted) -> str | None:
    """Return why an acceptance is implausible, or None."""
    names = (frame.worker_id, frame.pool, frame.provider, frame.region, frame.tier or "", frame.revision)
    if not all(len(name) <= MAX_NAME_CHARS and name.isprintable() for name in names):
        return "the worker's names are too long or not printable"
    if not 0 <= frame.queue_ms < float("inf"):
        return f"a job cannot have waited for {frame.queue_ms} ms"
    return None


def plausible_timings(timings: Timings | None, since_queued_s: float) -> Timings | None:
    """Return the engine's timings where they fit into the time since the attempt was queued, else None."""
    if timings is None:
        return None
    phases = (timings.engine_queue_ms, timings.prefill_ms, timings.decode_ms)
    is_plausible = all(phase >= 0 for phase in phases) and sum(phases) <= (since_queued_s + SLACK_S) * 1000
    return timings if is_plausible and 0 <= timings.preemptions <= MAX_PREEMPTIONS else None


def plausible_prompt(frame: Finished, choices: Choices, prompt_tokens: int) -> tuple[int, int]:
    """Return the provider's count of prompt tokens and of cached ones among them, within bounds."""
    usage = choices.usage
    if usage is not None:
        prompt_tokens = max(0, min(usage.prompt_tokens, len(choices) * max_plausible(prompt_tokens)))
    return prompt_tokens, max(0, min(frame.cached_tokens, prompt_tokens))


def max_plausible(tokens: int) -> int:
    """Return the highest plausible count of another tokenizer for ``tokens`` of ours."""
    return tokens * COUNT_FACTOR + COUNT_SLACK
