"""What admission knows of a request: fixed from here on."""

from dataclasses import dataclass

from protocol.messages import Sampling


@dataclass(frozen=True, slots=True)
class Admission:
    """What admission has found out about a request and what never changes about it."""

    request_id: str
    endpoint: str  # "chat.completions" | "completions"
    model: str  # canonical name
    key_id: str
    key_name: str
    tenant: str
    stream: bool
    prompt_ids: bytes  # packed
    prompt_tokens: int
    sampling: Sampling
    received_s: float  # monotonic clock
    received_unix_ms: int
    admitted_s: float  # monotonic clock
    queue_wait_s: float  # how long it may wait for a worker
    traceparent: str | None = None
