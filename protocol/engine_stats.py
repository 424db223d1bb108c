"""Statistics of a worker's engine, as its heartbeats report them. Counts only grow while the worker lives."""

from typing import Final

from msgspec import Struct

from protocol.wire import Real, Whole

MAX_BUCKETS: Final = 200  # of one histogram


class Histogram(Struct, frozen=True, array_like=True):
    """A histogram: the number of values in each bucket."""

    bounds: tuple[Real, ...]  # upper ones, rising; a value equal to one belongs to its bucket
    counts: tuple[Whole, ...]  # of each bucket alone; one more than bounds, for what is beyond the last
    total: Real  # sum of all values

    def __post_init__(self) -> None:
        """Refuse what nobody can show. Raises ValueError, which is a ProtocolError where it came over the wire."""
        if len(self.counts) != len(self.bounds) + 1 or len(self.counts) > MAX_BUCKETS:
            raise ValueError(f"{len(self.counts)} counts of {len(self.bounds)} bounds are no histogram")


class Pace(Struct, frozen=True, omit_defaults=True):
    """The speed of a watched node; 0: unknown."""

    tpot_ms: Real = 0.0  # between two tokens of one request alone, measured before it took jobs
    ttft_ms: Real = 0.0  # likewise, to the first token
    slowdown: Real = 0.0  # how many times as long tokens take now as is normal for it at such a load
    leaving: str = ""  # why it leaves its pool, once it does


class Paused(Struct, frozen=True, omit_defaults=True):
    """Why a live worker takes no jobs for now."""

    reason: str  # as its server has told it
    wait_ms: Whole = 0  # for so long, as its server asks; 0: it is broken, and comes back when a probe is answered
    has_changed: bool = False  # the server, or what it serves: it comes back when that is as before


class EngineStats(Struct, frozen=True, omit_defaults=True):
    """One engine at one moment. Sequences are choices; a job has one for each of its ``n``."""

    running: Whole  # sequences in the batch
    waiting: Whole  # sequences that are not, and jobs that wait in the worker
    kv_usage: Real  # share of the KV pool in use, 0 to 1
    prompt_tokens: Whole  # of admitted sequences, cached ones included
    generated_tokens: Whole
    step_tokens: Histogram  # tokens computed in one step
    inter_token_s: Histogram  # between two steps that yielded tokens for the same sequence
    queried_tokens: Whole = 0  # of prompts, looked for in the prefix cache
    cached_tokens: Whole = 0  # of these, found there
    drafts: Whole = 0
    guessed_tokens: Whole = 0  # in drafts
    right_tokens: Whole = 0  # of these, as many as were then sampled
    preemptions: Whole = 0
