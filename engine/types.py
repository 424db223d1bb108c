"""The engine's public records: the requests it takes and the outputs of its steps. Imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from engine.errors import GrammarTooComplex, RequestRejected
from protocol.generation import PromptLogprob, SamplingParams, TokenLogprob

FinishReason = Literal["stop", "length", "cancelled", "error"]
GrammarKind = Literal["json_schema", "json_object", "regex", "lark"]


class ContentFinder(Protocol):
    """Finds the content in one choice's text: neither reasoning, nor a tool call, nor their markup."""

    @property
    def read_chars(self) -> int:
        """Number of characters of the text that have been classified as content or not."""
        ...

    def push(self, text: str, *, is_last: bool) -> list[tuple[int, int]]:
        """Add text; return the begin and end, in the complete text, of each new stretch of content."""
        ...


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The state of a choice that another worker began: continue it without repetition."""

    index: int  # the choice
    token_ids: tuple[int, ...]  # the output tokens it already has, from its first
    text_chars: int  # characters (code points) of its text that the client already has


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and its parameters. `resume` holds at most one point per choice."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    resume: tuple[ResumePoint, ...] = ()
    scored_tokens: int = 0  # number of prompt logprobs, from the first, that the client already has
    adapter: str | None = None  # one of EngineConfig.adapters; None: the model itself
    cache_salt: str = ""  # only requests of the same salt share prompts in the prefix cache
    content_finder: Callable[[], ContentFinder] | None = None  # makes one for a choice; None: all text is content


Candidate = tuple[int, str, float, bytes]  # token id, text, logprob, bytes


@dataclass(frozen=True, slots=True)
class SequenceTimings:
    """The time of one choice in the engine so far, by phase."""

    queue_ms: float  # added → first scheduled
    prefill_ms: float  # first scheduled → first token
    decode_ms: float  # first token → last token
    preemptions: int = 0  # number of preemptions; the lost time counts in the phase in which it happened


@dataclass(slots=True)
class SequenceOutput:
    """One step's output for one choice of one request. The choice has ended when `finish_reason` is set."""

    request_id: str
    index: int  # the choice, 0 … n-1
    token_ids: list[int]  # new tokens; empty for flushed text or an end without a token
    text: str  # new text that is safe to show
    logprobs: list[TokenLogprob] | None = None  # one per new token, if requested
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it; None for the model's own end
    error: str | None = None  # the reason, if finish_reason is "error"
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    prompt_logprobs: list[PromptLogprob] | None = None  # the next ones, in order; all of them before the first token
    vector: bytes | None = None  # of a PoolingInput: 32-bit floats, little-endian
    timings: SequenceTimings | None = None  # with the first token, and at the choice's end

    @classmethod
    def failure(cls, request_id: str, error: str) -> "SequenceOutput":
        """Return the end of a request that failed before any of its choices began."""
        return cls(request_id, 0, [], "", finish_reason="error", error=error)

    def append(self, later: "SequenceOutput") -> None:
        """Append a later output of the same step."""
        self.token_ids += later.token_ids
        self.text += later.text
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.finish_reason, self.stop_reason, self.error = later.finish_reason, later.stop_reason, later.error
        self.timings = later.timings or self.timings


@dataclass(slots=True)
class Refusal(SequenceOutput):
    """The end of a request that can never be served: the client's error, so it is not retried."""

    param: str | None = None  # the invalid request field
    is_too_complex: bool = False  # its grammar is: no worker may retry it, not even one with wider limits

    @classmethod
    def of(cls, request_id: str, error: RequestRejected) -> "Refusal":
        """Return the end of a complete request."""
        refusal = cls(request_id, 0, [], "", finish_reason="error", error=error.message)
        refusal.param, refusal.is_too_complex = error.field, isinstance(error, GrammarTooComplex)
        return refusal


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A loaded LoRA adapter."""

    name: str
    ranks: tuple[int, int]  # the lowest and the highest of its layers
    layers: int  # linear layers that it changes
    bytes: int  # of its weights in memory
    digest: str  # of its files


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The loaded model and its capacity; constant for the engine's lifetime."""

    model: str  # hub name or path it was loaded from
    max_model_len: int  # tokens of prompt and output together
    max_sequences: int  # choices that run at once
    kv_tokens: int  # capacity of the KV pool
    eos_token_ids: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", "float16"
    quantize: str | None  # "int8": the type that linear layers use instead
    device: str
    vocab_size: int  # width of the logits
    parameters: int  # of the model, counted once if shared
    adapters: tuple[AdapterInfo, ...] = ()


def sequences_that_fit(info: EngineInfo, *, shortest: int = 256) -> dict[int, int]:
    """Return, for lengths doubling from `shortest` up to the longest, how many such sequences run at once."""
    lengths = []
    while shortest < info.max_model_len:
        lengths.append(shortest)
        shortest *= 2
    return {length: min(info.max_sequences, info.kv_tokens // length) for length in (*lengths, info.max_model_len)}


@dataclass(slots=True)
class EngineCounters:
    """Counters since the engine was created; they never decrease."""

    computed_tokens: int = 0  # passed through the model
    prompt_tokens: int = 0  # of admitted sequences, including cached ones
    queried_tokens: int = 0  # prompt tokens looked up in the prefix cache
    cached_tokens: int = 0  # of these, tokens found and so not computed
    generated_tokens: int = 0  # sampled
    drafts: int = 0
    guessed_tokens: int = 0  # draft tokens computed
    right_tokens: int = 0  # of these, tokens then sampled
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """The number of values in each bucket."""

    bounds: tuple[float, ...]  # upper bounds, ascending; a value equal to one belongs to its bucket
    counts: tuple[int, ...]  # per bucket; one more than bounds, for values above the last
    total: float  # sum of all values


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's statistics at one moment."""

    running: int  # sequences in the batch
    waiting: int  # sequences not in the batch, including preempted ones
    kv_usage: float  # share of the KV pool that sequences hold, 0 to 1; cached blocks count as free
    counters: EngineCounters
    step_tokens: HistogramCounts  # tokens computed in one step
    inter_token_s: HistogramCounts  # between two steps that yielded tokens for the same sequence


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's free capacity now, in sequences (choices) and tokens."""

    running: int
    waiting: int
    free_sequences: int  # that could start without waiting
    free_kv_tokens: int  # unreserved tokens of the KV pool, minus those that waiting sequences will take
