"""An admitted request, as shared by all parts of the gateway."""

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
# The conversation of a request, for pools that take messages. Set only if the model has such a pool.


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat as the HTTP edge has prepared it."""

    packed: bytes  # protocol.job.Chat
    # The answer is plain text, without tool calls or a schema, which cannot be resumed from text.
    is_plain: bool
    has_ids: bool  # the model also has own workers that take token ids
    # Returns the token ids of a partial answer, or None if they are ambiguous. None: the model takes no token ids, or
    # its engines' text has more than the client's (marks of reasoning).
    encode: Callable[[str], Awaitable[list[int] | None]] | None = None


# --- partial answer ---------------------------------------------------------------------------------------------------
#
# The part of an answer that another gateway received and this one continues.


class PartialAnswer(Struct, frozen=True):
    """The frames of an answer's beginning."""

    frames: Sequence[Tokens | Deltas] = ()
    attempt: int = 0  # the last known one; 0: none
    revision: str = ""  # protocol.job.Accepted.revision of their worker


# --- trace ------------------------------------------------------------------------------------------------------------
#
# The interface of one request's trace; ``gateway.telemetry.traces`` implements it.


class Trace(Protocol):
    """The spans of one request. After admission they follow the dispatcher's events."""

    @property
    def trace_id(self) -> str:
        """Id of the trace: the client's, or a new one."""
        ...

    @property
    def traceparent(self) -> str:
        """Trace context of the current attempt's job."""
        ...

    def part(self, request_id: str) -> Self:
        """Begin the trace of one of several requests of one call."""
        ...

    def refused(self, status: int | None, error: Refused | None) -> None:
        """End the trace of a refused request; ``error`` is None if the client disconnected before."""
        ...

    def parts_ended(self, status: int | None) -> None:
        """End the trace of several requests; ``status`` is None if the client disconnected before."""
        ...


# --- queue position ---------------------------------------------------------------------------------------------------
#


class QueuePosition(Struct, frozen=True):
    """Position of a job among all that wait for its model, with the estimated wait."""

    position: int  # from 1
    eta_s: float | None  # until a worker accepts it; None: unknown


# --- call -------------------------------------------------------------------------------------------------------------
#
# A call before admission: its arrival, its body, and the prompt that it becomes.


@dataclass(frozen=True, slots=True)
class Arrival:
    """One call's arrival at this gateway."""

    request_id: str  # the public id, in headers, records and logs: "req_…"
    received_s: float  # monotonic clock
    received_unix_ms: int
    queue_wait_s: float  # longest wait for workers, over all attempts
    deadline_s: float = float("inf")  # monotonic clock; set by the client, for the whole answer
    traceparent: str | None = None  # the client's, unchanged
    trace: Trace | None = None  # None: traces are off
    body_bytes: int = 0
    tags: Tags | None = None  # from its header

    @property
    def id(self) -> str:
        """The id without its prefix, for the ids of answers."""
        return self.request_id.removeprefix("req_")

    def part(self, number: int, parts: int) -> "Arrival":
        """Return the arrival of one of several parts."""
        part = replace(self, request_id=f"{self.request_id}-{number}", body_bytes=self.body_bytes // parts)
        return part if self.trace is None else replace(part, trace=self.trace.part(part.request_id))

    @property
    def created_unix_s(self) -> int:
        """Time of arrival, for answers."""
        return self.received_unix_ms // 1000


class Prompt(Struct, frozen=True):
    """The input of a worker: a call, encoded with a model's tokenizer."""

    token_ids: bytes  # packed; empty if the model's workers take none
    tokens: int  # by the gateway's count
    param: str  # the field that holds the prompt, as errors name it
    sampling: Sampling
    pooling: Pooling | None = None  # not None: the request is for vectors
    stream: bool = False
    conversation: Conversation | None = None  # set if a pool that takes messages may serve it
    limit_param: str | None = None  # the field that limits the output; None: there is none


class Body(Protocol):
    """The fields of every body besides its prompt."""

    model: str
    do_not_queue: bool | None
    allow_hosted: bool | None
    metadata: dict[str, str] | None

    @property
    def is_batch(self) -> bool:
        """True for a batch request, served after interactive ones."""
        ...


class Call(Protocol):
    """One validated body."""

    name: str  # as in RequestRecord.endpoint
    adapted: set[str]  # names of changes that its model required (gateway.tokenizing.turns)

    @property
    def request(self) -> Body:
        """The body."""
        ...

    def serve_as_batch(self) -> None:
        """Make it a batch request, because its key allows nothing else."""
        ...

    def parts(self, settings: GatewaySettings) -> Sequence[Self]:
        """Return the calls that each become one request, usually only itself. Raises InvalidParameter."""
        ...

    async def prompt(self, tokens: ModelTokens, settings: GatewaySettings) -> Prompt:
        """Tokenize and check one part. Raises Refused."""
        ...

    def check(self, prompts: Sequence[Prompt], settings: GatewaySettings) -> None:
        """Check limits that apply to all parts together. Raises InvalidParameter."""
        ...


AnyCall = TypeVar("AnyCall", bound=Call)


# --- admission --------------------------------------------------------------------------------------------------------
#
# The immutable specification of an admitted request.

JOB_OVERHEAD_BYTES: Final = 512  # names, ids, times, and the stream's overhead


@dataclass(frozen=True, slots=True)
class Admission:
    """The immutable data of an admitted request."""

    arrival: Arrival
    endpoint: str  # see protocol.job.Origin
    model: str  # canonical name
    principal: Principal  # the client's key
    prompt: Prompt
    admitted_s: float  # monotonic clock
    batch: bool = False  # OpenAI's service tier "flex": served after interactive requests
    weight: float = 1.0  # the tenant's share of the workers, relative to other tenants
    do_not_queue: bool = False  # refuse instead of waiting
    tokenizer: str = ""  # that encoded the prompt: protocol.job.Revision.tokenizer; empty: any
    hosted: tuple[str, ...] = ()  # providers of hosted APIs that it may use
    reservation: Reservation | None = None  # None: key and team have no limits
    tags: Tags | None = None  # the client's
    request_id: str = field(init=False)
    trusted: bool = field(init=False)  # its key requires trusted pools
    consent: Consent | None = field(init=False)  # to keep request and answer
    queue: str = field(init=False)  # of its jobs

    def __post_init__(self) -> None:  # computed once: admission control reads these about twenty times
        object.__setattr__(self, "request_id", self.arrival.request_id)
        object.__setattr__(self, "trusted", self.principal.trusted_only)
        object.__setattr__(self, "consent", consent_of(self.principal))
        object.__setattr__(self, "queue", queue_of(self.model, trusted=self.trusted))

    @property
    def job_bytes(self) -> int:
        """Approximate size of its job in bytes, including a prompt stored by reference."""
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
