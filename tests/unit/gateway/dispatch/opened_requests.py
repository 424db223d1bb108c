"""An open request with recorded actions, and frames of workers."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from gateway.dispatch.lifecycle import OpenRequest, RequestState
from gateway.dispatch.revisions import takers_of
from gateway.settings import TimeoutSettings
from protocol.errors import ErrorCode
from protocol.job import Accepted, Cancel, Failed, Finished, Frame, Heartbeat, Sampling, Tokens
from tests.unit.gateway.admission.controls import admission, ticket_of

ID = "req_1"


@dataclass
class RecordedActions:
    """The actions of a request, in order."""

    published: list[int] = field(default_factory=list)
    withdrawn: list[int] = field(default_factory=list)
    cancelled: list[tuple[str, Cancel]] = field(default_factory=list)
    asked: list[tuple[str, int, int]] = field(default_factory=list)
    fenced: list[tuple[str, Frame]] = field(default_factory=list)
    held: list[tuple[str | None, int]] = field(default_factory=list)  # worker, attempt
    pauses: list[float] = field(default_factory=list)
    recorded: list[tuple[int, str, str | None, int]] = field(default_factory=list)  # attempt, outcome, code, tokens
    ends: int = 0
    statuses: list[int | None] = field(default_factory=list)  # of settled requests
    others: list[Heartbeat] = field(default_factory=list)  # live workers that could run the next attempt

    def takers(self, request: RequestState) -> list[Heartbeat]:
        return takers_of(request, self.others)

    def publish(self, request: OpenRequest, after_s: float) -> None:
        self.published.append(request.attempt)
        self.pauses.append(after_s)

    def accepted(self, request: OpenRequest) -> None:
        self.held.append((request.worker_id, request.attempt))

    def attempt_over(self, request: OpenRequest) -> None:
        if request.worker_id is not None:
            self.held.remove((request.worker_id, request.attempt))

    def fence_out(self, worker_id: str, frame: Frame, now_s: float) -> None:
        self.fenced.append((worker_id, frame))

    def record_lost_attempt(self, request: OpenRequest, outcome: str, code: str | None, now_s: float) -> None:
        self.recorded.append((request.attempt, outcome, code, request.attempt_tokens))

    def withdraw(self, request: OpenRequest) -> None:
        self.withdrawn.append(request.attempt)

    def cancel(self, worker_id: str, cancel: Cancel) -> None:
        self.cancelled.append((worker_id, cancel))

    def request_resend(self, request: OpenRequest, worker_id: str, from_seq: int) -> None:
        self.asked.append((worker_id, request.attempt, from_seq))

    def record(self, request: OpenRequest) -> asyncio.Future[None]:
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stored.set_result(None)
        return stored

    def ended(self, request: OpenRequest) -> None:
        self.ends += 1

    def settled(self, request: OpenRequest) -> None:
        self.statuses.append(request.http_status)


class Closing:
    """Does nothing: the test closes the request."""

    def close(self, request: OpenRequest, http_status: int | None) -> None:
        raise AssertionError("unexpected close")

    def hand_over(self, request: OpenRequest) -> None:
        raise AssertionError("unexpected handover")


def open_request(
    n: int = 1,
    *,
    stream: bool = True,
    max_attempts: int = 3,
    prompt_logprobs: int | None = None,
    trusted: bool = False,
    actions: RecordedActions | None = None,
    **timeouts: float,
) -> tuple[OpenRequest, RecordedActions]:
    entering = admission(
        token_ids=b"\x01\x00\x00\x00" * 3,
        tokens=3,
        sampling=Sampling(max_tokens=100, n=n, prompt_logprobs=prompt_logprobs),
        stream=stream,
        trusted=trusted,
    )
    actions = actions or RecordedActions()
    limits = TimeoutSettings.model_validate(timeouts)
    return OpenRequest(ticket_of(entering), limits, max_attempts, actions, 0.0), actions


def accepted(attempt: int = 1) -> Accepted:
    return Accepted(ID, attempt, 0, "w", "pool", "provider", "region", 1.0)


def tokens(seq: int, text: str = "x", ids: tuple[int, ...] = (1,), attempt: int = 1, **rest: Any) -> Tokens:
    return Tokens(ID, attempt, seq, rest.pop("index", 0), ids, text, **rest)


def finished(seq: int, attempt: int = 1, *, cancelled: bool = False, completion_tokens: int = 0) -> Finished:
    return Finished(
        ID,
        attempt,
        seq,
        cancelled=cancelled,
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=completion_tokens,
        ttft_ms=1.0,
    )


def failed(seq: int, attempt: int = 1, code: str = "engine_died", *, retryable: bool = True) -> Failed:
    return Failed(ID, attempt, seq, code, "boom", retryable=retryable)


async def texts(request: OpenRequest) -> str:
    if not len(request.mailbox):
        return ""
    return "".join(event.text for event in await request.mailbox.take() if isinstance(event, Tokens))


def lose_worker(request: OpenRequest, now_s: float) -> None:
    request.worker_lost(ErrorCode.WORKER_LOST, "worker w is lost", now_s)
