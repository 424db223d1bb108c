"""Statistics of a worker's engine, as its heartbeats report them. Counts only grow while the worker lives."""

from msgspec import Struct


class Histogram(Struct, frozen=True, array_like=True):
    """A histogram: the number of values in each bucket."""

    bounds: tuple[float, ...]  # upper ones, rising; a value equal to one belongs to its bucket
    counts: tuple[int, ...]  # of each bucket alone; one more than bounds, for what is beyond the last
    total: float  # sum of all values


class Pace(Struct, frozen=True, omit_defaults=True):
    """The speed of a watched node; 0: unknown."""

    tpot_ms: float = 0.0  # between two tokens of one request alone, measured before it took jobs
    ttft_ms: float = 0.0  # likewise, to the first token
    slowdown: float = 0.0  # how many times as long tokens take now as is normal for it at such a load
    leaving: str = ""  # why it leaves its pool, once it does


class EngineStats(Struct, frozen=True, omit_defaults=True):
    """One engine at one moment. Sequences are choices; a job has one for each of its ``n``."""

    running: int  # sequences in the batch
    waiting: int  # sequences that are not, and jobs that wait in the worker
    kv_usage: float  # share of the KV pool in use, 0 to 1
    prompt_tokens: int  # of admitted sequences, cached ones included
    generated_tokens: int
    step_tokens: Histogram  # tokens computed in one step
    inter_token_s: Histogram  # between two steps that yielded tokens for the same sequence
    queried_tokens: int = 0  # of prompts, looked for in the prefix cache
    cached_tokens: int = 0  # of these, found there
    drafts: int = 0
    guessed_tokens: int = 0  # in drafts
    right_tokens: int = 0  # of these, as many as were then sampled
    preemptions: int = 0
