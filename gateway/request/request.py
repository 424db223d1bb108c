"""A request that is admitted, as all parts of the gateway know it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, Self, TypeVar

from msgspec import Struct

from db.accounts.principal import Consent, Principal, consent_of
from gateway.errors import Refused
from gateway.limits.reservation import Reservation
from gateway.settings import GatewaySettings
from gateway.tokenizing.model_tokens import ModelTokens
from protocol.generation import Pooling
from protocol.job import Deltas, Sampling, Tokens, encode
from protocol.subjects import queue_of
from protocol.usage import Tags

# --- conversation -----------------------------------------------------------------------------------------------------
#
# A request's conversation, for pools that take messages: only requests for models that have such a pool hold one.


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat as the HTTP edge has prepared it."""

    packed: bytes  # protocol.job.Chat
    # Its answer is mere text: neither calls of tools nor a schema, which nobody continues with from the middle.
    is_plain: bool
    has_ids: bool  # its model's own workers can answer it, too
    # The token ids of a part of its answer, None where they cannot be told; None: it has none, or what engines make of
    # it is more than what is told (marks of reasoning).
    encode: Callable[[str], Awaitable[list[int] | None]] | None = None


# --- made before ------------------------------------------------------------------------------------------------------
#
# What another gateway has received of an answer that this one goes on with.


class MadeBefore(Struct, frozen=True):
    """The frames of an answer's beginning."""

    frames: Sequence[Tokens | Deltas] = ()
    attempt: int = 0  # the last that is known of; 0: none
    revision: str = ""  # protocol.job.Accepted.revision of whoever has made them


# --- trace ------------------------------------------------------------------------------------------------------------
#
# The interface of one request's trace; ``gateway.telemetry.traces`` implements it.


class Trace(Protocol):
    """The spans of one request. What happens after its admission comes to them as events of the dispatcher."""

    @property
    def trace_id(self) -> str:
        """Id of the trace: the client's, or its own."""
        ...

    @property
    def traceparent(self) -> str:
        """Trace context of the current attempt's job."""
        ...

    def part(self, request_id: str) -> Self:
        """Begin the trace of one of several requests that the client has sent as one."""
        ...

    def refused(self, status: int | None, error: Refused | None) -> None:
        """End the trace of a refused request; ``error`` is None where the client disconnected before."""
        ...

    def parts_ended(self, status: int | None) -> None:
        """End the trace of several requests; ``status`` is None where the client disconnected before."""
        ...


# --- queue position ---------------------------------------------------------------------------------------------------
#
# Queue positions.


class QueuePosition(Struct, frozen=True):
    """Position of a job among all that wait for its model."""

    position: int  # from 1
    eta_s: float | None  # until a worker takes it; None: unknown


# --- call -------------------------------------------------------------------------------------------------------------
#
# What is asked, before it is admitted: when and how it came, what it says, and what that makes of a model's prompt.


@dataclass(frozen=True, slots=True)
class Arrival:
    """One call's arrival at this gateway."""

    request_id: str  # the public id, in headers, records and logs: "req_…"
    received_s: float  # monotonic clock
    received_unix_ms: int
    queue_wait_s: float  # how long it may wait for workers, over all attempts
    deadline_s: float = float("inf")  # monotonic clock; the caller's own: the whole answer is worth nothing later
    traceparent: str | None = None  # the caller's, as it came
    trace: Trace | None = None  # None: traces are off
    body_bytes: int = 0
    tags: Tags | None = None  # of its header

    @property
    def id(self) -> str:
        """The id without its prefix: that of an answer, which has one of its own."""
        return self.request_id.removeprefix("req_")

    def part(self, number: int, parts: int) -> "Arrival":
        """Return the arrival of one of several parts."""
        part = replace(self, request_id=f"{self.request_id}-{number}", body_bytes=self.body_bytes // parts)
        return part if self.trace is None else replace(part, trace=self.trace.part(part.request_id))

    @property
    def created_unix_s(self) -> int:
        """When it came, as answers tell it."""
        return self.received_unix_ms // 1000


class Prompt(Struct, frozen=True):
    """A call with a model's tokenizer: what a worker gets of it."""

    token_ids: bytes  # packed; empty where they mean nothing to the model's workers
    tokens: int  # as counted here
    param: str  # the field that holds the prompt, as errors name it
    sampling: Sampling
    pooling: Pooling | None = None  # not None: vectors are wanted instead of text
    stream: bool = False
    conversation: Conversation | None = None  # where the model has pools that take messages, and these may take it
    limit_param: str | None = None  # the field that limits the output; None: its size is not the caller's choice


class Body(Protocol):
    """What every body says beside its prompt."""

    model: str
    do_not_queue: bool | None
    allow_hosted: bool | None
    metadata: dict[str, str] | None

    @property
    def is_batch(self) -> bool:
        """True if the request takes what interactive ones leave."""
        ...


class Call(Protocol):
    """One validated body."""

    name: str  # as in RequestRecord.endpoint
    adapted: set[str]  # what was changed so that its model takes it (gateway.tokenizing.turns)

    @property
    def request(self) -> Body:
        """The body."""
        ...

    def serve_as_batch(self) -> None:
        """Serve it as batch, whatever the client asked: its key allows no more."""
        ...

    def parts(self, settings: GatewaySettings) -> Sequence[Self]:
        """Return the calls that each become a request, usually itself alone. Raises InvalidParameter."""
        ...

    async def prompt(self, tokens: ModelTokens, settings: GatewaySettings) -> Prompt:
        """Count and check a part. Raises Refused."""
        ...

    def check(self, prompts: Sequence[Prompt], settings: GatewaySettings) -> None:
        """Check what only all parts together tell. Raises InvalidParameter."""
        ...


AnyCall = TypeVar("AnyCall", bound=Call)


# --- admission --------------------------------------------------------------------------------------------------------
#
# The specification of an admitted request, fixed from here on.

JOB_OVERHEAD_BYTES: Final = 512  # names, ids, times, and what the stream adds


@dataclass(frozen=True, slots=True)
class Admission:
    """Everything known of a request at its admission; none of it changes."""

    arrival: Arrival
    endpoint: str  # see protocol.job.Origin
    model: str  # canonical name
    principal: Principal  # who asks
    prompt: Prompt
    admitted_s: float  # monotonic clock
    batch: bool = False  # OpenAI's service tier "flex": served from what interactive requests leave
    weight: float = 1.0  # the tenant's share of the workers, against other tenants'
    do_not_queue: bool = False  # refuse rather than wait
    tokenizer: str = ""  # that has made the prompt's ids: protocol.job.Revision.tokenizer; empty: any
    hosted: tuple[str, ...] = ()  # providers of hosted APIs that it may go to
    reservation: Reservation | None = None  # of limits; None: its key and team have none
    tags: Tags | None = None  # its caller's own
    request_id: str = field(init=False)
    trusted: bool = field(init=False)  # its key demands trusted pools
    consent: Consent | None = field(init=False)  # to keep what is asked and answered
    queue: str = field(init=False)  # in which its jobs wait

    def __post_init__(self) -> None:  # once: admission control reads these some twenty times
        object.__setattr__(self, "request_id", self.arrival.request_id)
        object.__setattr__(self, "trusted", self.principal.trusted_only)
        object.__setattr__(self, "consent", consent_of(self.principal))
        object.__setattr__(self, "queue", queue_of(self.model, trusted=self.trusted))

    @property
    def job_bytes(self) -> int:
        """Approximate size of its job in bytes, wherever its prompt is stored."""
        pooling = 0 if self.prompt.pooling is None else len(encode(self.prompt.pooling))
        chat = 0 if self.prompt.conversation is None else len(self.prompt.conversation.packed)
        return JOB_OVERHEAD_BYTES + len(self.prompt.token_ids) + chat + len(encode(self.prompt.sampling)) + pooling

    @property
    def answers(self) -> int:
        """Number of answers: choices, or inputs."""
        return self.prompt.sampling.n if self.prompt.pooling is None else self.prompt.pooling.inputs

    @property
    def tokens_to_score(self) -> int:
        """Number of prompt tokens whose logprobs are requested."""
        return 0 if self.prompt.sampling.prompt_logprobs is None else self.prompt.tokens
