"""Every message that crosses NATS between a gateway, a worker and the ledger writer.

Encoded as msgpack by msgspec. Frames are arrays, because they are many and small; other messages are maps without
default values. Readers ignore unknown fields and skip frames of an unknown kind, so both may be added without a new
version. A change of meaning raises ``PROTOCOL_VERSION``, and the previous release must already be able to read it. An
unreadable message is left to other workers (a job), parked (a usage record) or dropped, but never misinterpreted:
docs/how-to/upgrades.md.

    gateway ──Job──────────────────────────────> worker      JetStream, ``subjects.job_subject``
    gateway ──Cancel | Resend | Ping───────────> worker      core NATS, ``subjects.control_subject``
    gateway <─StepFrame[Accepted|Tokens|…]────── worker      core NATS, ``Job.reply_subject`` and the worker's id
    gateway <─Heartbeat, ModelCard────────────── worker      KV buckets
    gateway ──RequestRecord──┐
    worker  ──AttemptRecord──┴─────────────────> ledger      JetStream, ``usage.>``; see ``usage``

The fence is (request_id, attempt, worker, seq). If several workers accept an attempt, because the queue redelivered
it, the first whose frame reaches the gateway is its worker, and the others are stopped. ``seq`` numbers that worker's
frames from 0 without gaps. A gateway drops frames of all attempts but the current one.
"""

from array import array
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct, field

from protocol import wire
from protocol.errors import ProtocolError
from protocol.generation import Pooling, PoolingCard, PromptLogprob, SamplingParams, TokenLogprob
from protocol.subjects import queue_of
from protocol.wire import Real, Whole

Input = Literal["ids", "text", "messages"]  # an engine's form of input: token ids, the prompt's text, messages
TAKES_IDS: Final = "ids"
TAKES_MESSAGES: Final = "messages"
# ``Revision.tokenizer`` of a job whose token ids are unusable. No tokenizer has this name, and pools that take messages
# have no tokenizer.
NO_TOKENIZER: Final = "-"

# The field of a chat's body that switches reasoning on or off.
THINKING: Final = "chat_template_kwargs.enable_thinking"
# Fields of a chat's body that a pool may ignore if its API lacks them. They do not change the form of the answer.
DROPPABLE: Final = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "seed",
        "stop_token_ids",
        "min_tokens",
        "ignore_eos",
        "allowed_token_ids",
        "bad_words",
        "reasoning_effort",
        THINKING,
    }
)

CountedBy = Literal["engine", "provider", "estimate"]  # source of the token counts
PartKind = Literal["text", "reasoning", "call", "arguments", "refusal"]


class Call(Struct, frozen=True, omit_defaults=True):
    """A tool call in an assistant's message."""

    id: str
    name: str
    arguments: str = ""  # JSON, as the model wrote it


class Turn(Struct, frozen=True, omit_defaults=True):
    """One message of a conversation, with OpenAI's roles; legacy functions are converted to tools."""

    role: str  # "system" | "developer" | "user" | "assistant" | "tool"
    content: str | None = None
    name: str | None = None  # of the speaker, or of the function whose result this is
    calls: tuple[Call, ...] = ()
    call_id: str | None = None  # of the call whose result this is
    reasoning: str | None = None


class Tool(Struct, frozen=True, omit_defaults=True):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: str | None = None  # JSON: the schema of its arguments; None: none
    is_strict: bool | None = None  # None: not set by the client


class AnswerSchema(Struct, frozen=True, omit_defaults=True):
    """The required form of the answer's text: JSON that matches a schema, if any."""

    schema: str | None = None  # JSON; None: any object
    name: str = "answer"
    is_strict: bool | None = None


class Chat(Struct, frozen=True, omit_defaults=True):
    """A conversation, and the client's requirements for the answer beyond ``Sampling``."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()  # empty if ``tool_choice`` is "none"
    tool_choice: str | None = None  # "auto" | "required"; None: not set
    only_tool: str | None = None  # name of the tool that must be called
    is_single_call: bool = False
    schema: AnswerSchema | None = None
    reasoning_effort: str | None = None
    thinks: bool | None = None  # whether the model should reason; None: not set
    is_limited: bool = False  # the client set ``Sampling.max_tokens``; otherwise it is what the context leaves
    continues_last: bool = False  # the answer continues the last message, which is the assistant's


class Part(Struct, frozen=True, array_like=True):
    """A piece of an answer. Arguments belong to the last call that began."""

    kind: PartKind
    text: str  # of a call: the tool's name
    call_id: str = ""


class ChatUsage(Struct, frozen=True, array_like=True):
    """The token usage of one choice."""

    counted_by: CountedBy
    prompt_tokens: Whole
    completion_tokens: Whole  # reasoning included
    cached_tokens: Whole = 0  # of the prompt
    reasoning_tokens: Whole = 0


class Deltas(Struct, frozen=True, array_like=True, tag="d"):
    """The output of a pool that takes messages, for one choice at a time: a frame, instead of ``Tokens``.

    Sent only by workers that take messages. Only gateways that support this frame send them jobs.
    """

    request_id: str
    attempt: int
    seq: int
    index: int
    parts: tuple[Part, ...]
    tokens: Whole = 0  # of the parts, estimated
    finish_reason: str | None = None  # "stop" | "length" | "content_filter" on the choice's last frame
    usage: ChatUsage | None = None  # with the finish reason; replaces the estimates

    # The interface of ``Tokens``, for readers of both: only text, no token data.

    @property
    def text(self) -> str:
        """The choice's text, without reasoning and tool calls."""
        return "".join([part.text for part in self.parts if part.kind == "text"])

    @property
    def token_ids(self) -> tuple[int, ...]:
        """No token ids."""
        return ()

    @property
    def logprobs(self) -> None:
        """No log-probabilities."""

    @property
    def prompt_logprobs(self) -> None:
        """No log-probabilities."""


_chat_decoder = msgspec.msgpack.Decoder(Chat)
encode_chat = msgspec.msgpack.Encoder().encode


def decode_chat(packed: bytes) -> Chat:
    """Decode a conversation. Raises ProtocolError."""
    return wire.decode(_chat_decoder, packed)


# --- engine stats -----------------------------------------------------------------------------------------------------
#
# Statistics of a worker's engine in its heartbeats. Counts only grow during a worker's lifetime.

MAX_BUCKETS: Final = 200  # of one histogram


class Histogram(Struct, frozen=True, array_like=True):
    """A histogram: the number of values in each bucket."""

    bounds: tuple[Real, ...]  # upper bounds, inclusive and increasing
    counts: tuple[Whole, ...]  # of each bucket alone; one more than bounds, for larger values
    total: Real  # sum of all values

    def __post_init__(self) -> None:
        """Check the lengths. Raises ValueError, which the decoder turns into a ProtocolError."""
        if len(self.counts) != len(self.bounds) + 1 or len(self.counts) > MAX_BUCKETS:
            raise ValueError(f"a histogram of {len(self.bounds)} bounds cannot have {len(self.counts)} counts")


class Pace(Struct, frozen=True, omit_defaults=True):
    """The speed of a watched node; 0: unknown."""

    tpot_ms: Real = 0.0  # between two tokens of a single request, measured before it took jobs
    ttft_ms: Real = 0.0  # to the first token, measured likewise
    slowdown: Real = 0.0  # current time per token relative to normal at this load
    leaving: str = ""  # why it leaves its pool, if it does


class Paused(Struct, frozen=True, omit_defaults=True):
    """Why a live worker takes no jobs."""

    reason: str  # from its server
    wait_ms: Whole = 0  # the wait that its server asks for; 0: broken, until a probe succeeds
    has_changed: bool = False  # the server or its models changed: paused until they are as before


class EngineStats(Struct, frozen=True, omit_defaults=True):
    """A snapshot of one engine. A job has one sequence for each of its ``n`` choices."""

    running: Whole  # sequences in the batch
    waiting: Whole  # sequences outside the batch, and jobs that wait in the worker
    kv_usage: Real  # share of the KV pool in use, 0 to 1
    prompt_tokens: Whole  # of admitted sequences, including cached ones
    generated_tokens: Whole
    step_tokens: Histogram  # tokens computed in one step
    inter_token_s: Histogram  # between two steps that yielded tokens for the same sequence
    queried_tokens: Whole = 0  # of prompts, looked up in the prefix cache
    cached_tokens: Whole = 0  # of these, found there
    drafts: Whole = 0
    guessed_tokens: Whole = 0  # in drafts
    right_tokens: Whole = 0  # of these, accepted
    preemptions: Whole = 0


# --- jobs, frames and heartbeats --------------------------------------------------------------------------------------

PROTOCOL_VERSION: Final = wire.PROTOCOL_VERSION
TokenId = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]  # what ``pack_token_ids`` takes


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Pack token ids as unsigned little-endian 32-bit integers."""
    return array("I", token_ids).tobytes()


def unpack_token_ids(packed: bytes) -> list[int]:
    """Reverse ``pack_token_ids``. Raises ProtocolError if the length is not a multiple of four."""
    if len(packed) % 4:
        raise ProtocolError(f"packed token ids: {len(packed)} bytes are not a multiple of four")
    token_ids = array("I")
    token_ids.frombytes(packed)
    return token_ids.tolist()


class Markup(Struct, frozen=True, omit_defaults=True):
    """The formats that separate an answer's content from its reasoning and calls (``protocol.dialects``)."""

    tool_parser: str
    reasoning_parser: str
    tools: tuple[str, ...] = ()  # names of tools that the answer may call
    begins_in_reasoning: bool = False  # the prompt opens the reasoning


class Sampling(SamplingParams, frozen=True, omit_defaults=True, kw_only=True):
    """The sampling parameters of a job."""

    max_tokens: int  # always sent: the gateway fills in the default
    markup: Markup | None = None  # set if there are stop strings and not all text is content
    # The model's own values of parameters that the client did not set. A pool that does not support one ignores it.
    defaults: dict[str, float] = field(default_factory=dict)


class ResumePoint(Struct, frozen=True, omit_defaults=True):
    """The progress of one choice, from which another worker can resume it."""

    index: int  # the choice
    token_ids: bytes  # output tokens the gateway holds, packed
    text_chars: int  # characters of their text that the gateway holds (not all if a stop prefix is held back)
    finish_reason: str | None = None  # set: this choice is complete and must not be run again
    text: str | None = None  # text so far, for workers that take messages; None: they cannot continue it
    is_encoded: bool = False  # ``token_ids`` were encoded from its text, because the original ones are unknown
    tokens: int | None = None  # tokens used so far, if different from the number of ``token_ids``

    @property
    def used_tokens(self) -> int:
        """Number of output tokens used so far."""
        return len(self.token_ids) // 4 if self.tokens is None else self.tokens


class Revision(Struct, frozen=True, array_like=True):
    """The weights and tokenizer of a worker. Empty: not reported, by a worker of an older release."""

    weights: str = ""  # identifies weights, configuration, precision, quantization, adapter and tokenizer
    tokenizer: str = ""  # identifies the tokenizer alone, and so the meaning of token ids


class Origin(Struct, frozen=True, omit_defaults=True):
    """The origin of a request: the fields its record needs if its gateway dies before publishing one."""

    gateway_id: str
    endpoint: str  # "chat.completions" | "completions" | "embeddings" | "score" | "rerank"
    key_id: str
    key_name: str
    stream: bool
    team_id: str | None = None
    organisation_id: str | None = None


class Job(Struct, frozen=True, omit_defaults=True):
    """One attempt at one request, with everything that a worker needs."""

    v: int
    request_id: str
    attempt: int  # from 1; numbered only by the gateway
    model: str
    reply_subject: str  # where frames go: the owning gateway's inbox
    sampling: Sampling
    prompt_ids: bytes  # packed; empty if prompt_object is set
    prompt_object: str | None = None  # name in the ``prompts`` object bucket, for prompts too large for a message
    prompt_tokens: int = 0  # their number, also if the ids travel by reference
    resume: tuple[ResumePoint, ...] = ()
    tenant: str = ""  # the fairness domain: the key's team, or the key itself
    accepted_unix_ms: int = 0  # when the gateway admitted the request
    deadline_unix_ms: int = 0  # a worker that pulls it later fails it without running it
    traceparent: str | None = None  # W3C trace context
    weight: float = 1.0  # the tenant's share of the workers, relative to other tenants
    avoid: tuple[str, ...] = ()  # workers on which earlier attempts failed: they take it only if no other worker can
    origin: Origin | None = None
    pooling: Pooling | None = None  # set: no text is generated, and ``sampling`` is ignored
    scored_tokens: int = 0  # leading prompt tokens whose logprobs the gateway holds
    # The revision that a worker must run; empty fields match any. Weights are set if a part of the answer exists.
    revision: Revision = Revision()
    chat: bytes | None = None  # packed ``protocol.job.Chat``, if the model has pools that take messages
    chat_object: str | None = None  # like prompt_object
    hosted: tuple[str, ...] = ()  # providers of hosted APIs that it may use, for a job in a hosted pool's lane
    # Frames go to reply_subject, a dot and the worker's id, so that workers cannot send frames as another one.
    reply_by_worker: bool = False
    object_key: bytes = b""  # decrypts prompt_object and chat_object; empty: they are not encrypted
    # The tenant's: prefix caches share this prompt only among requests with the same salt. Empty: with all without one.
    cache_salt: str = ""

    @property
    def answers(self) -> int:
        """Number of numbered answers: choices, or inputs."""
        return self.sampling.n if self.pooling is None else self.pooling.inputs


# --- frames: worker → gateway -----------------------------------------------------------------------------------------


class Accepted(Struct, frozen=True, array_like=True, tag="a"):
    """A worker pulled the job and will run it. Always ``seq`` 0."""

    request_id: str
    attempt: int
    seq: int
    worker_id: str
    pool: str
    provider: str
    region: str
    queue_ms: Real  # publish → pull, from the worker's clock and JetStream's timestamp
    tier: str | None = None  # of its pool
    revision: str = ""  # Revision.weights of what it runs
    counted_by: CountedBy = "engine"  # source of its token counts; "provider": it takes messages


class Tokens(Struct, frozen=True, array_like=True, tag="t"):
    """The output of one engine step for one choice."""

    request_id: str
    attempt: int
    seq: int
    index: int
    token_ids: tuple[TokenId, ...]
    text: str  # may be empty while a possible stop string or incomplete character is held back
    finish_reason: str | None = None  # "stop" | "length" on the choice's last frame
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token of token_ids
    # The next prompt tokens, in separate frames without output tokens: once per request, before choice 0's first token.
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None


class Vector(Struct, frozen=True, array_like=True, tag="v"):
    """The answer to one input of a pooling job."""

    request_id: str
    attempt: int
    seq: int
    index: int  # the input
    values: bytes  # 32-bit floats, little-endian


class Timings(Struct, frozen=True, array_like=True):
    """The time that an attempt spent in the engine: three consecutive phases, over all its choices."""

    engine_queue_ms: Real  # submitted to the engine → a choice is first scheduled
    prefill_ms: Real  # → the first token of any choice
    decode_ms: Real  # → the last token of the last choice
    preemptions: Whole  # of all choices; their time is part of the phase in which they happened


class Finished(Struct, frozen=True, array_like=True, tag="f"):
    """The end of an attempt: all choices are complete or canceled. Counts are the engine's and exact."""

    request_id: str
    attempt: int
    seq: int
    cancelled: bool
    prompt_tokens: Whole
    cached_tokens: Whole
    completion_tokens: Whole  # generated by this attempt, over all choices, without resumed ones
    ttft_ms: Real  # pull → first token; 0 if there was none
    timings: Timings | None = None  # None: the engine does not report them


class Failed(Struct, frozen=True, array_like=True, tag="x"):
    """The end of an attempt without an answer."""

    request_id: str
    attempt: int
    seq: int
    code: str  # protocol.errors.ErrorCode
    message: str
    retryable: bool  # another worker may succeed
    param: str | None = None  # the invalid field of the request, for client errors
    completion_tokens: Whole = 0
    timings: Timings | None = None  # None: the engine did not report them, or did not start


class Dropped(Struct, frozen=True, array_like=True, tag="k"):
    """Fields that the attempt's pool ignores by its configuration. Sent before all output."""

    request_id: str
    attempt: int
    seq: int
    fields: tuple[str, ...]  # of ``protocol.job.DROPPABLE``


class UnreadableFrame(Struct, frozen=True, array_like=True, tag="?"):
    """Replaces a frame that the reader could not decode; never sent."""

    request_id: str  # every frame of any kind begins with its tag, this field and the next two
    attempt: int
    seq: int
    kind: str  # the frame's tag
    reason: str

    @property
    def is_known(self) -> bool:
        """True if this build knows the kind, so that the frame is invalid, not from a newer release."""
        return self.kind in _FRAME_TAGS


Frame = Accepted | Dropped | Tokens | Deltas | Vector | Finished | Failed | UnreadableFrame
_FRAME_TAGS: Final = {
    kind.__struct_config__.tag for kind in (Accepted, Dropped, Tokens, Deltas, Vector, Finished, Failed)
}


# --- control: gateway → worker ----------------------------------------------------------------------------------------


class Cancel(Struct, frozen=True, array_like=True, tag="c"):
    """Stop this attempt, free its slot, and answer with Finished(cancelled=True). Idempotent."""

    request_id: str
    attempt: int


class Resend(Struct, frozen=True, array_like=True, tag="r"):
    """Resend the frames of this attempt from ``from_seq`` on, because some were lost.

    A worker that does not know the attempt answers Failed(UNKNOWN_ATTEMPT) with ``seq`` = ``from_seq``.
    """

    request_id: str
    attempt: int
    from_seq: int
    reply_subject: str


class Ping(Struct, frozen=True, array_like=True, tag="p"):
    """Probe a worker. It does not answer; if its connection closed, the server replies "no responders" at once."""


class Drain(Struct, frozen=True, array_like=True, tag="d"):
    """Take no new jobs, finish or hand back running ones, and exit: the fleet controller's SIGTERM. Idempotent."""


Control = Cancel | Resend | Ping | Drain


# --- registry: worker → KV --------------------------------------------------------------------------------------------


class Heartbeat(Struct, frozen=True, omit_defaults=True):
    """A worker's state, put every ``topology.HEARTBEAT_PERIOD_S`` into the ``workers`` bucket under its id."""

    v: int
    worker_id: str
    pool: str
    provider: str
    region: str
    tier: str  # "spot" | "reserved" | "on-demand" | "hosted"
    engine: str
    models: tuple[str, ...]
    usd_per_hour: Real
    max_sequences: Whole
    max_kv_tokens: Whole
    free_sequences: Whole
    free_kv_tokens: Whole
    running: Whole
    started_unix_ms: Whole
    sent_unix_ms: Whole
    draining: bool = False
    jobs_taken: Whole = 0  # since the worker started; its growth is the service rate
    tokens_made: Whole = 0  # output tokens since the worker started
    stats: EngineStats | None = None  # None: the engine does not report them
    busy_ms: Whole = 0  # time with at least one job since it started, sampled at heartbeats
    revisions: dict[str, Revision] = {}  # of its models
    takes: Input = "ids"
    continues: bool = True  # whether it resumes answers of other workers
    pace: Pace | None = None  # None: not measured
    machine: str = ""  # the fleet controller's machine that it runs on; "": none
    trusted: bool = False  # it takes only jobs that require trusted pools
    batch_jobs_taken: Whole = 0  # of jobs_taken: those of the low lane
    paused: Paused | None = None  # None: not paused

    @property
    def queues(self) -> list[str]:
        """The queues that it serves; for a hosted pool, those in which it serves a lane."""
        return [queue_of(model, trusted=self.trusted) for model in self.models]

    @property
    def takes_jobs(self) -> bool:
        """True if it takes new jobs."""
        return not self.draining and self.paused is None


class ModelCard(Struct, frozen=True, omit_defaults=True):
    """Everything that a gateway needs to render and tokenize a model's prompts without access to a model hub."""

    v: int
    model: str
    context_length: Whole  # prompt + output tokens, as the engine enforces it
    tokenizer_object: str  # name in the ``artifacts`` object bucket: a Hugging Face tokenizer.json
    chat_template: str | None  # Jinja source; None: the model has no chat format
    special_tokens: dict[str, str] = {}  # bos_token, eos_token, …: the template's variables
    add_special_tokens: bool = True  # whether plain completions are encoded with the tokenizer's special tokens
    pooling: PoolingCard | None = None  # None: it generates text
    tool_template: str | None = None  # for conversations with tools, if the model has a separate template
    revision: str = ""  # Revision.weights of the worker that published it
    sampling: dict[str, float] = {}  # from generation_config.json: protocol.generation


class JobHead(Struct, frozen=True):
    """The fields common to jobs of all versions: enough to report an unreadable job to its gateway."""

    request_id: str
    attempt: int
    reply_subject: str
    reply_by_worker: bool = False


encode = msgspec.msgpack.Encoder().encode  # shared, because building encoders and decoders is slow
_job_decoder = msgspec.msgpack.Decoder(Job)
_job_head_decoder = msgspec.msgpack.Decoder(JobHead)
_control_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)
_heartbeat_decoder = msgspec.msgpack.Decoder(Heartbeat)
_card_decoder = msgspec.msgpack.Decoder(ModelCard)


def decode_job(payload: bytes) -> Job:
    """Decode a Job. Raises ProtocolError."""
    return wire.decode_versioned(_job_decoder, payload)


def decode_job_head(payload: bytes) -> JobHead:
    """Decode the common fields of a Job of any version. Raises ProtocolError."""
    return wire.decode(_job_head_decoder, payload)


def decode_control(payload: bytes) -> Control:
    """Decode a Cancel, a Resend, a Ping or a Drain. Raises ProtocolError."""
    return wire.decode(_control_decoder, payload)


def decode_heartbeat(payload: bytes, sender: str = "") -> Heartbeat:
    """Decode a Heartbeat. ``sender``: the worker on whose own subject it arrived.

    Raises ProtocolError, also if it names another worker.
    """
    beat: Heartbeat = wire.decode_versioned(_heartbeat_decoder, payload)
    if sender and sender != beat.worker_id:
        raise ProtocolError(f"{sender} sent a heartbeat as {beat.worker_id}")
    return beat


def decode_model_card(payload: bytes) -> ModelCard:
    """Decode a ModelCard. Raises ProtocolError."""
    return wire.decode_versioned(_card_decoder, payload)


# --- rescue -----------------------------------------------------------------------------------------------------------
#
# Resuming an answer that earlier attempts began.

# "ids": from the original token ids; "text": from the answer's text, re-encoded or as text; "message": from an
# assistant's message; "start": from the beginning, because nothing was generated or sent to the client.
Rescue = Literal["ids", "text", "message", "start"]


def rescue_of(job: Job, takes: Input) -> Rescue | None:
    """Return how a worker with this input form resumes a job; None for a first attempt and for a pooling job."""
    if job.pooling is not None:
        return None
    is_begun = any(point.token_ids or point.text for point in job.resume)
    return rescue_by(job.attempt, takes, is_begun=is_begun, is_encoded=any(point.is_encoded for point in job.resume))


def rescue_by(attempt: int, takes: Input, *, is_begun: bool, is_encoded: bool) -> Rescue | None:
    """Return the result of ``rescue_of`` from the fields that it depends on. ``is_encoded``: see ``ResumePoint``."""
    if attempt == 1:
        return None
    if not is_begun:
        return "start"
    if takes == TAKES_MESSAGES:
        return "message"
    return "ids" if takes == TAKES_IDS and not is_encoded else "text"


# --- steps ------------------------------------------------------------------------------------------------------------
#
# Step frames: all frames of one engine step for one gateway, decoded so that one invalid frame does not lose others.


class StepFrame(Struct, frozen=True, array_like=True):
    """All frames of one engine step for one gateway: one NATS message."""

    v: int
    worker_id: str
    frames: tuple[Frame, ...]


class _SealedStep(Struct, array_like=True):
    """A StepFrame whose frames have not been decoded."""

    v: int
    worker_id: str
    frames: tuple[msgspec.Raw, ...]


class _FrameHead(Struct, array_like=True):
    tag: str
    request_id: str
    attempt: int
    seq: int


_step_decoder = msgspec.msgpack.Decoder(StepFrame)
_sealed_step_decoder = msgspec.msgpack.Decoder(_SealedStep)
_frame_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)
_frame_head_decoder = msgspec.msgpack.Decoder(_FrameHead)


def decode_step(payload: bytes, sender: str = "") -> StepFrame:
    """Decode a StepFrame; an unreadable frame becomes an ``UnreadableFrame``.

    ``sender``: the worker on whose own subject it arrived; empty: a shared subject. Raises ProtocolError, also if the
    frames name another worker.
    """
    try:
        step = _step_decoder.decode(payload)
    except wire.UNDECODABLE:
        step = _decode_apart(payload)
    wire.check_version(step.v)
    if sender and sender != step.worker_id:
        raise ProtocolError(f"{sender} sent frames as {step.worker_id}")
    return step


def _decode_apart(payload: bytes) -> StepFrame:
    wire.check_array_version(payload)
    step = wire.decode(_sealed_step_decoder, payload)
    return StepFrame(step.v, step.worker_id, tuple(_decode_frame(bytes(frame)) for frame in step.frames))


def _decode_frame(frame: bytes) -> Frame | UnreadableFrame:
    try:
        return _frame_decoder.decode(frame)
    except wire.UNDECODABLE as error:
        head = wire.decode(_frame_head_decoder, frame, "frame")
        return UnreadableFrame(head.request_id, head.attempt, head.seq, head.tag, str(error))
