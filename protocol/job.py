"""Every message that crosses NATS between a gateway, a worker and the ledger writer.

Encoded as msgpack by msgspec. Frames are arrays (they are many and small); everything else is a map whose default
values are left out. A reader ignores fields it does not know, so fields may be appended without a new version, and so
may kinds of frames: one of an unknown kind is passed over. A change of meaning raises ``PROTOCOL_VERSION``, and is read
by the release before the one that writes it. What comes all the same is left to others (a job), parked (a usage
record) or dropped, and never taken for something else: docs/how-to/upgrades.md.

    gateway ──Job──────────────────────────────> worker      JetStream, ``subjects.job_subject``
    gateway ──Cancel | Resend | Ping───────────> worker      core NATS, ``subjects.control_subject``
    gateway <─StepFrame[Accepted|Tokens|…]────── worker      core NATS, ``Job.reply_subject`` and the worker's id
    gateway <─Heartbeat, ModelCard────────────── worker      KV buckets
    gateway ──RequestRecord──┐
    worker  ──AttemptRecord──┴─────────────────> ledger      JetStream, ``usage.>``; see ``usage``

The fence is (request_id, attempt, worker, seq): of the workers that accept an attempt (more than one where the queue
has delivered it again) the first whose frame the gateway receives is its worker, the others are stopped; ``seq``
counts that worker's frames from 0 without gaps, and a gateway drops frames of any attempt but its current one.
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

Input = Literal["ids", "text", "messages"]  # what a pool's engine is asked with: token ids, a prompt's text, messages
TAKES_IDS: Final = "ids"
TAKES_MESSAGES: Final = "messages"
# In ``Revision.tokenizer`` of a job that its token ids cannot be used for: no tokenizer is called so, and pools that
# take messages have none.
NO_TOKENIZER: Final = "-"

# How a chat's body names the switch of reasoning.
THINKING: Final = "chat_template_kwargs.enable_thinking"
# Fields of a chat's body that a pool may leave out where its API lacks them: the form of the answer stays the same.
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

CountedBy = Literal["engine", "provider", "estimate"]  # whose counts of tokens these are
PartKind = Literal["text", "reasoning", "call", "arguments", "refusal"]


class Call(Struct, frozen=True, omit_defaults=True):
    """A call of a tool, in an assistant's message."""

    id: str
    name: str
    arguments: str = ""  # JSON, as the model wrote it


class Turn(Struct, frozen=True, omit_defaults=True):
    """One message of a conversation, in OpenAI's roles; older forms (functions) are tools by now."""

    role: str  # "system" | "developer" | "user" | "assistant" | "tool"
    content: str | None = None
    name: str | None = None  # of who speaks, or of the function whose result this is
    calls: tuple[Call, ...] = ()
    call_id: str | None = None  # of the call whose result this is
    reasoning: str | None = None


class Tool(Struct, frozen=True, omit_defaults=True):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: str | None = None  # JSON: the schema of its arguments; None: it has none
    is_strict: bool | None = None  # None: the caller has not said


class AnswerSchema(Struct, frozen=True, omit_defaults=True):
    """The required form of the answer's text: JSON, matching a schema where there is one."""

    schema: str | None = None  # JSON; None: any object
    name: str = "answer"
    is_strict: bool | None = None


class Chat(Struct, frozen=True, omit_defaults=True):
    """A conversation, and what its caller says of the answer beyond ``Sampling``."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()  # without those that ``tool_choice`` "none" forbids
    tool_choice: str | None = None  # "auto" | "required"; None: not said
    only_tool: str | None = None  # the name of the one that must be called
    is_single_call: bool = False
    schema: AnswerSchema | None = None
    reasoning_effort: str | None = None
    thinks: bool | None = None  # whether the model is to reason; None: not said
    is_limited: bool = False  # ``Sampling.max_tokens`` was asked for, and is not merely what the context leaves
    continues_last: bool = False  # the caller wants the last message, an assistant's, to be gone on with


class Part(Struct, frozen=True, array_like=True):
    """A piece of an answer. Arguments are of the call that began last."""

    kind: PartKind
    text: str  # of a call: the tool's name
    call_id: str = ""


class ChatUsage(Struct, frozen=True, array_like=True):
    """The tokens that one choice has used."""

    counted_by: CountedBy
    prompt_tokens: Whole
    completion_tokens: Whole  # reasoning included
    cached_tokens: Whole = 0  # of the prompt
    reasoning_tokens: Whole = 0


class Deltas(Struct, frozen=True, array_like=True, tag="d"):
    """The output of a pool that takes messages, for one choice at a time: a frame, instead of ``Tokens``.

    Sent only by workers that take messages, which get no jobs but of gateways that know this frame.
    """

    request_id: str
    attempt: int
    seq: int
    index: int
    parts: tuple[Part, ...]
    tokens: Whole = 0  # that the parts have, as estimated
    finish_reason: str | None = None  # "stop" | "length" | "content_filter" on the choice's last frame
    usage: ChatUsage | None = None  # with the finish reason: takes the place of the estimates

    # What a frame of tokens has, for those who read either: text alone, and nothing of tokens.

    @property
    def text(self) -> str:
        """The choice's text, without reasoning and tool calls."""
        return "".join([part.text for part in self.parts if part.kind == "text"])

    @property
    def token_ids(self) -> tuple[int, ...]:
        """None: not reported."""
        return ()

    @property
    def logprobs(self) -> None:
        """None likewise."""

    @property
    def prompt_logprobs(self) -> None:
        """None likewise."""


_chat_decoder = msgspec.msgpack.Decoder(Chat)
encode_chat = msgspec.msgpack.Encoder().encode


def decode_chat(packed: bytes) -> Chat:
    """Decode a conversation. Raises ProtocolError."""
    return wire.decode(_chat_decoder, packed)


# --- engine stats -----------------------------------------------------------------------------------------------------
#
# Statistics of a worker's engine, as its heartbeats report them. Counts only grow while the worker lives.

MAX_BUCKETS: Final = 200  # of one histogram


class Histogram(Struct, frozen=True, array_like=True):
    """A histogram: the number of values in each bucket."""

    bounds: tuple[Real, ...]  # upper ones, rising; a value equal to one belongs to its bucket
    counts: tuple[Whole, ...]  # of each bucket alone; one more than bounds, for what is beyond the last
    total: Real  # sum of all values

    def __post_init__(self) -> None:
        """Refuse what nobody can show. Raises ValueError, which is a ProtocolError where it came over the wire."""
        if len(self.counts) != len(self.bounds) + 1 or len(self.counts) > MAX_BUCKETS:
            raise ValueError(f"a histogram of {len(self.bounds)} bounds cannot have {len(self.counts)} counts")


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


# --- jobs, frames and heartbeats --------------------------------------------------------------------------------------

PROTOCOL_VERSION: Final = wire.PROTOCOL_VERSION
TokenId = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]  # what ``pack_token_ids`` takes


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Pack token ids as unsigned 32-bit integers in the machine's (little-endian) order: a copy, no loop in Python."""
    return array("I", token_ids).tobytes()


def unpack_token_ids(packed: bytes) -> list[int]:
    """Reverse ``pack_token_ids``. Raises ProtocolError if the length is not a multiple of four."""
    if len(packed) % 4:
        raise ProtocolError(f"packed token ids: {len(packed)} bytes are not a multiple of four")
    token_ids = array("I")
    token_ids.frombytes(packed)
    return token_ids.tolist()


class Markup(Struct, frozen=True, omit_defaults=True):
    """The formats by which an answer's visible content is told from its reasoning and calls (``protocol.dialects``)."""

    tool_parser: str
    reasoning_parser: str
    tools: tuple[str, ...] = ()  # names of those that the answer may call
    begins_in_reasoning: bool = False  # the prompt opens the reasoning


class Sampling(SamplingParams, frozen=True, omit_defaults=True, kw_only=True):
    """The sampling parameters of a job."""

    max_tokens: int  # on the wire always: the gateway has already filled in the default
    markup: Markup | None = None  # of answers in which not all text is content; only where there are stop strings
    # The model's own values of what the caller has left out. A pool that cannot honour one leaves it out, too.
    defaults: dict[str, float] = field(default_factory=dict)


class ResumePoint(Struct, frozen=True, omit_defaults=True):
    """The progress of one choice, from which another worker can resume it."""

    index: int  # the choice
    token_ids: bytes  # output tokens the gateway holds, packed
    text_chars: int  # characters of their text that the gateway holds (fewer than all where a stop prefix is held back)
    finish_reason: str | None = None  # set: this choice is complete and must not be run again
    text: str | None = None  # what it says so far, for those who take messages; None: it is not to be gone on with so
    is_encoded: bool = False  # ``token_ids`` were made of its text, for want of those that the model has made
    tokens: int | None = None  # how many it has used up, where ``token_ids`` do not tell

    @property
    def used_tokens(self) -> int:
        """Number of output tokens used so far."""
        return len(self.token_ids) // 4 if self.tokens is None else self.tokens


class Revision(Struct, frozen=True, array_like=True):
    """The weights and tokenizer that a worker computes with. Empty: not reported, by a worker of an older release."""

    weights: str = ""  # stands for weights, configuration, precision, quantisation, adapter, tokenizer
    tokenizer: str = ""  # stands for the tokenizer alone: what token ids mean


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
    """One attempt at one request: everything a worker needs to generate its tokens."""

    v: int
    request_id: str
    attempt: int  # from 1; numbered by the gateway alone
    model: str
    reply_subject: str  # where frames go: the owning gateway's inbox
    sampling: Sampling
    prompt_ids: bytes  # packed; empty if prompt_object is set
    prompt_object: str | None = None  # name in the ``prompts`` object bucket, for prompts too large for a message
    prompt_tokens: int = 0  # their number, known also where the ids travel by reference
    resume: tuple[ResumePoint, ...] = ()
    tenant: str = ""  # the fairness domain: the key's team, or the key itself
    accepted_unix_ms: int = 0  # when the gateway admitted the request
    deadline_unix_ms: int = 0  # a worker that pulls it later than this fails it unrun
    traceparent: str | None = None  # W3C trace context
    weight: float = 1.0  # the tenant's share of the workers, against other tenants'
    avoid: tuple[str, ...] = ()  # workers on which earlier attempts failed: these take it only if nobody else can
    origin: Origin | None = None
    pooling: Pooling | None = None  # no text is made, and ``sampling`` means nothing
    scored_tokens: int = 0  # of the prompt, from its first: how many logprobs the gateway holds
    # Only such a worker may take it; of what is empty, any. Its weights where a part of the answer is made already.
    revision: Revision = Revision()
    chat: bytes | None = None  # packed ``protocol.job.Chat``, where the model has pools that take messages
    chat_object: str | None = None  # as prompt_object
    hosted: tuple[str, ...] = ()  # providers of hosted APIs that it may go to: of a job in a hosted pool's lane
    # Whether frames go to reply_subject, a dot and the worker's id, so that nobody can send them in another's name.
    reply_by_worker: bool = False
    object_key: bytes = b""  # opens prompt_object and chat_object; empty: they are stored as they are
    # Of the tenant: prefix caches find this prompt for requests of the same salt only. Empty: for all without one.
    cache_salt: str = ""

    @property
    def answers(self) -> int:
        """Number of numbered answers: choices, or inputs."""
        return self.sampling.n if self.pooling is None else self.pooling.inputs


# --- frames: worker → gateway -----------------------------------------------------------------------------------------


class Accepted(Struct, frozen=True, array_like=True, tag="a"):
    """A worker has pulled the job and will run it. Always ``seq`` 0."""

    request_id: str
    attempt: int
    seq: int
    worker_id: str
    pool: str
    provider: str
    region: str
    queue_ms: Real  # publish → pull, by the worker's clock against JetStream's time stamp
    tier: str | None = None  # of its pool
    revision: str = ""  # Revision.weights of what it runs
    counted_by: CountedBy = "engine"  # whose counts its own will be; "provider": it takes messages


class Tokens(Struct, frozen=True, array_like=True, tag="t"):
    """The output of one engine step for one choice."""

    request_id: str
    attempt: int
    seq: int
    index: int
    token_ids: tuple[TokenId, ...]
    text: str  # may be empty while a possible stop string or an incomplete character is held back
    finish_reason: str | None = None  # "stop" | "length" on the choice's last frame
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token of token_ids
    # The prompt's next tokens, in frames of their own, without a token: once per request, before choice 0's first.
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None


class Vector(Struct, frozen=True, array_like=True, tag="v"):
    """The answer to one input of a pooling job."""

    request_id: str
    attempt: int
    seq: int
    index: int  # the input
    values: bytes  # 32-bit floats, little-endian


class Timings(Struct, frozen=True, array_like=True):
    """The time an attempt spent in the engine: three phases, one after the other, over all its choices."""

    engine_queue_ms: Real  # given to the engine → a choice is first scheduled
    prefill_ms: Real  # → the first token of any choice
    decode_ms: Real  # → the last token of the last choice
    preemptions: Whole  # of all choices; what they cost is in the phase they happened in


class Finished(Struct, frozen=True, array_like=True, tag="f"):
    """The attempt is over, all choices complete or cancelled. Counts are the engine's own and exact."""

    request_id: str
    attempt: int
    seq: int
    cancelled: bool
    prompt_tokens: Whole
    cached_tokens: Whole
    completion_tokens: Whole  # made by this attempt, over all choices; tokens resumed from are not counted again
    ttft_ms: Real  # pull → first token; 0 if none was made
    timings: Timings | None = None  # None: the engine does not report them


class Failed(Struct, frozen=True, array_like=True, tag="x"):
    """The attempt is over without an answer."""

    request_id: str
    attempt: int
    seq: int
    code: str  # protocol.errors.ErrorCode
    message: str
    retryable: bool  # another worker may do better
    param: str | None = None  # the request field at fault, for the caller's mistakes
    completion_tokens: Whole = 0
    timings: Timings | None = None  # None: the engine does not report them, or has not begun


class Dropped(Struct, frozen=True, array_like=True, tag="k"):
    """Fields that the attempt's pool does not honour, and leaves out as it is configured to. Before all output."""

    request_id: str
    attempt: int
    seq: int
    fields: tuple[str, ...]  # of ``protocol.job.DROPPABLE``


class UnreadableFrame(Struct, frozen=True, array_like=True, tag="?"):
    """Stands in for a frame that its reader could not decode; it is never sent."""

    request_id: str  # with this and the next two every frame begins, of whatever kind, after its tag
    attempt: int
    seq: int
    kind: str  # the frame's tag
    reason: str

    @property
    def is_known(self) -> bool:
        """True if this build knows the kind: then the frame is broken, not from a newer release."""
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
    """Send the frames of this attempt again from ``from_seq`` on: some were lost on the way.

    A worker that does not know the attempt answers Failed(UNKNOWN_ATTEMPT) with ``seq`` = ``from_seq``.
    """

    request_id: str
    attempt: int
    from_seq: int
    reply_subject: str


class Ping(Struct, frozen=True, array_like=True, tag="p"):
    """Probe a worker. A worker does not answer; if its connection is gone, the server reports so immediately."""


class Drain(Struct, frozen=True, array_like=True, tag="d"):
    """Take nothing new, finish or hand back what runs, and end: the fleet controller's SIGTERM. Idempotent."""


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
    jobs_taken: Whole = 0  # since the worker started: their increase is the rate at which the queue is served
    tokens_made: Whole = 0  # output tokens, likewise
    stats: EngineStats | None = None  # None: the engine does not report them
    busy_ms: Whole = 0  # time with at least one job since it started, as seen from heartbeat to heartbeat
    revisions: dict[str, Revision] = {}  # of its models
    takes: Input = "ids"
    continues: bool = True  # answers that another worker has begun
    pace: Pace | None = None  # None: it is not watched
    machine: str = ""  # that the fleet controller launched it on; "": none
    trusted: bool = False  # it takes the jobs that demand trusted pools, and no others
    batch_jobs_taken: Whole = 0  # of jobs_taken: those of the low lane
    paused: Paused | None = None  # None: it takes jobs

    @property
    def queues(self) -> list[str]:
        """The queues that it serves, or for a hosted pool, serves a lane of."""
        return [queue_of(model, trusted=self.trusted) for model in self.models]

    @property
    def takes_jobs(self) -> bool:
        """True if it takes new jobs."""
        return not self.draining and self.paused is None


class ModelCard(Struct, frozen=True, omit_defaults=True):
    """Everything a gateway needs to count and render prompts for a model without any hub access."""

    v: int
    model: str
    context_length: Whole  # prompt + output tokens, as the engine enforces it
    tokenizer_object: str  # name in the ``artifacts`` object bucket: a Hugging Face tokenizer.json
    chat_template: str | None  # Jinja source; None: the model has no chat format
    special_tokens: dict[str, str] = {}  # bos_token, eos_token, …: the template's variables
    add_special_tokens: bool = True  # whether plain completions encode with the tokenizer's own special tokens
    pooling: PoolingCard | None = None  # None: it generates text
    tool_template: str | None = None  # for conversations with tools, where the model has one of its own for them
    revision: str = ""  # Revision.weights of the worker that has published it
    sampling: dict[str, float] = {}  # of generation_config.json: protocol.generation


class JobHead(Struct, frozen=True):
    """The fields that jobs of every version share: enough to report to its gateway that no worker can read it."""

    request_id: str
    attempt: int
    reply_subject: str
    reply_by_worker: bool = False


encode = msgspec.msgpack.Encoder().encode  # one encoder, and one decoder a kind: building them is the slow part
_job_decoder = msgspec.msgpack.Decoder(Job)
_job_head_decoder = msgspec.msgpack.Decoder(JobHead)
_control_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)
_heartbeat_decoder = msgspec.msgpack.Decoder(Heartbeat)
_card_decoder = msgspec.msgpack.Decoder(ModelCard)


def decode_job(payload: bytes) -> Job:
    """Decode a Job. Raises ProtocolError."""
    return wire.decode_versioned(_job_decoder, payload)


def decode_job_head(payload: bytes) -> JobHead:
    """Decode of a Job, of whatever version, what all have. Raises ProtocolError."""
    return wire.decode(_job_head_decoder, payload)


def decode_control(payload: bytes) -> Control:
    """Decode a Cancel, a Resend, a Ping or a Drain. Raises ProtocolError."""
    return wire.decode(_control_decoder, payload)


def decode_heartbeat(payload: bytes, sender: str = "") -> Heartbeat:
    """Decode a Heartbeat. ``sender``: the worker whose own subject it came on.

    Raises ProtocolError, also where it is in another worker's name.
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
# Resuming an answer that earlier attempts have begun.

# "ids": from the very token ids; "text": from the answer's text, encoded again or as it is; "message": from an
# assistant's message; "start": nothing was made yet, or nothing of it was told.
Rescue = Literal["ids", "text", "message", "start"]


def rescue_of(job: Job, takes: Input) -> Rescue | None:
    """Return how a worker that takes such input resumes a job; None for a first attempt, and for a pooling job."""
    if job.pooling is not None:
        return None
    is_begun = any(point.token_ids or point.text for point in job.resume)
    return rescue_by(job.attempt, takes, is_begun=is_begun, is_encoded=any(point.is_encoded for point in job.resume))


def rescue_by(attempt: int, takes: Input, *, is_begun: bool, is_encoded: bool) -> Rescue | None:
    """Return the same as ``rescue_of``, from the fields it depends on. ``is_encoded``: see ``ResumePoint``."""
    if attempt == 1:
        return None
    if not is_begun:
        return "start"
    if takes == TAKES_MESSAGES:
        return "message"
    return "ids" if takes == TAKES_IDS and not is_encoded else "text"


# --- steps ------------------------------------------------------------------------------------------------------------
#
# Step frames: all frames that one engine step has for one gateway, and the decoding that survives a broken one.


class StepFrame(Struct, frozen=True, array_like=True):
    """All frames that one engine step has for one gateway: one NATS message."""

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
    """Decode a StepFrame; a frame that cannot be read becomes an ``UnreadableFrame``.

    ``sender``: the worker whose own subject it came on; empty: it came on one that all may publish to. Raises
    ProtocolError, also where the frames are in another worker's name.
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
