"""The specification of an admitted request, fixed from here on."""

from dataclasses import dataclass, field
from typing import Final

from db.accounts.principal import Consent, Principal
from gateway.limits.reservation import Reservation
from gateway.request.conversation import Conversation
from gateway.request.trace import Trace
from protocol.generation import Pooling
from protocol.job import Sampling, encode
from protocol.subjects import queue_of

JOB_OVERHEAD_BYTES: Final = 512  # names, ids, times, and what the stream adds


@dataclass(frozen=True, slots=True)
class Admission:
    """Everything known of a request at its admission; none of it changes."""

    request_id: str
    endpoint: str  # see protocol.job.Origin
    model: str  # canonical name
    principal: Principal  # who asks
    stream: bool
    prompt_ids: bytes  # packed; empty where they mean nothing to the model's workers
    prompt_tokens: int  # as counted here
    prompt_param: str  # the field that holds the prompt, as errors name it
    sampling: Sampling
    received_s: float  # monotonic clock
    received_unix_ms: int
    admitted_s: float  # monotonic clock
    queue_wait_s: float  # how long it may wait for workers, over all attempts
    traceparent: str | None = None  # the caller's, as it came
    trace: Trace | None = None  # None: traces are off
    batch: bool = False  # OpenAI's service tier "flex": served from what interactive requests leave
    weight: float = 1.0  # the tenant's share of the workers, against other tenants'
    do_not_queue: bool = False  # refuse rather than wait
    deadline_s: float = float("inf")  # monotonic clock; the caller's own: the whole answer is worth nothing later
    pooling: Pooling | None = None  # not None: vectors are wanted instead of text
    consent: Consent | None = None  # to keep what is asked and answered
    body_bytes: int = 0
    tokenizer: str = ""  # that has made the prompt's ids: protocol.job.Revision.tokenizer; empty: any
    hosted: tuple[str, ...] = ()  # providers of hosted APIs that it may go to
    trusted: bool = False  # its key demands trusted pools
    conversation: Conversation | None = None  # where the model has pools that take messages, and these may take it
    reservation: Reservation | None = None  # of limits; None: its key and team have none
    queue: str = field(init=False)  # in which its jobs wait

    def __post_init__(self) -> None:  # once: admission control reads it some twenty times
        object.__setattr__(self, "queue", queue_of(self.model, trusted=self.trusted))

    @property
    def job_bytes(self) -> int:
        """Approximate size of its job in bytes, wherever its prompt is stored."""
        pooling = 0 if self.pooling is None else len(encode(self.pooling))
        chat = 0 if self.conversation is None else len(self.conversation.packed)
        return JOB_OVERHEAD_BYTES + len(self.prompt_ids) + chat + len(encode(self.sampling)) + pooling

    @property
    def answers(self) -> int:
        """Number of answers: choices, or inputs."""
        return self.sampling.n if self.pooling is None else self.pooling.inputs

    @property
    def tokens_to_score(self) -> int:
        """Number of prompt tokens whose logprobs are requested."""
        return 0 if self.sampling.prompt_logprobs is None else self.prompt_tokens
