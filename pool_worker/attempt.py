"""One attempt at one job on this worker, from its pull to its last frame.

pulled ──> waiting ──credit──> fetching prompt ──> running ──> ended
              └──────────────────────┴────────────────┴──cancel, failure, drain──^
"""

import math
import time
from collections.abc import Callable
from typing import Final, Literal

from msgspec.structs import asdict

from engine.types import SequenceTimings
from pool_worker.credit import Cost
from pool_worker.engines.base import AnyEngine
from pool_worker.engines.chat import ChatOutput
from pool_worker.generation import billed_prompt_tokens_of, prompt_tokens_of
from pool_worker.settings import WorkerSettings
from protocol.generation import PromptLogprob, TokenLogprob
from protocol.job import (
    PROTOCOL_VERSION,
    TAKES_MESSAGES,
    Accepted,
    ChatUsage,
    CountedBy,
    Deltas,
    Dropped,
    Failed,
    Finished,
    Frame,
    Job,
    Timings,
    Tokens,
    Vector,
    encode,
    rescue_of,
)
from protocol.nats.clock import unix_now_ms
from protocol.nats.pull import Delivery
from protocol.subjects import LOW_LANE
from protocol.usage import AttemptRecord


def attempt_id(request_id: str, attempt: int) -> str:
    """Return an attempt's id: the engine's request id, and the message id of its usage record."""
    return f"{request_id}.{attempt}"


class Attempt:
    """The worker's state of one attempt, with all its encoded frames. Kept for a while after its end."""

    __slots__ = (
        "cached_tokens",
        "completion_tokens",
        "cost",
        "deliveries",
        "frames",
        "holds_credit",
        "id",
        "in_engine",
        "job",
        "lane",
        "live",
        "made",
        "prompt_tokens",
        "provided",
        "pulled_s",
        "queue_ms",
        "replay_bytes",
        "started_unix_ms",
        "timings",
        "ttft_ms",
        "was_cancelled",
    )

    def __init__(self, job: Job, delivery: Delivery, cost: Cost) -> None:
        self.id = attempt_id(job.request_id, job.attempt)
        self.job = job
        self.lane = delivery.subject.rpartition(".")[2]  # the lane that it was pulled from, of subjects.LANES
        self.cost = cost
        self.deliveries = delivery.deliveries  # of its message, including this one
        self.prompt_tokens = billed_prompt_tokens_of(job) if job.hosted else prompt_tokens_of(job)
        self.holds_credit = False  # `cost` has been taken from the worker's credit
        self.in_engine = False
        complete = {point.index for point in job.resume if point.finish_reason is not None}
        self.live = set(range(job.answers)) - complete  # choices or inputs that have not ended
        self.pulled_s = time.monotonic()
        self.started_unix_ms = unix_now_ms()
        self.queue_ms = float(max(0, self.started_unix_ms - delivery.stored_unix_ms))
        self.ttft_ms: float | None = None
        self.cached_tokens = 0  # prompt tokens that the engine did not compute for the first token
        self.completion_tokens = 0  # generated here, over all choices
        self.made = [0] * job.answers  # completion tokens by choice
        self.provided = 0  # choices that ended with the provider's own counts
        self.timings: dict[int, SequenceTimings] = {}  # by choice: the latest that the engine reported
        self.was_cancelled = False
        self.frames: list[bytes] = []  # by seq
        self.replay_bytes = 0

    def add(self, frame: Frame) -> bytes:
        """Keep a frame for replay and return it encoded."""
        encoded = encode(frame)
        self.frames.append(encoded)
        self.replay_bytes += len(encoded)
        return encoded

    @property
    def is_batch(self) -> bool:
        """True if it only uses capacity that interactive work leaves idle."""
        return self.lane == LOW_LANE

    def elapsed_ms(self) -> float:
        """Return the milliseconds since the pull."""
        return (time.monotonic() - self.pulled_s) * 1000

    @property
    def first_token_s(self) -> float:
        """Return when its first token came (monotonic clock); infinite before that."""
        return math.inf if self.ttft_ms is None else self.pulled_s + self.ttft_ms / 1000

    def remaining_s(self, now_s: float) -> float:
        """Return an upper bound of its remaining time at its pace so far; infinite while a choice has no pace yet."""
        if self.ttft_ms is None:
            return math.inf
        running_s = now_s - self.pulled_s - self.ttft_ms / 1000
        resumed = {point.index: point.used_tokens for point in self.job.resume}
        longest_s = 0.0
        for index in self.live:
            made = self.made[index]
            if made < 2:
                return math.inf
            left = self.job.sampling.max_tokens - resumed.get(index, 0) - made
            longest_s = max(longest_s, left * running_s / (made - 1))
        return longest_s

    def engine_timings(self) -> Timings | None:
        """Return the time spent in the engine; None if not reported yet. All choices were submitted together."""
        timings = self.timings
        if not timings:
            return None
        queue_ms = min([choice.queue_ms for choice in timings.values()])
        first_token_ms = min([choice.queue_ms + choice.prefill_ms for choice in timings.values()])
        end_ms = max([choice.queue_ms + choice.prefill_ms + choice.decode_ms for choice in timings.values()])
        if self.live and self.ttft_ms is not None:  # still running: its phase lasts until now
            end_ms = max(end_ms, first_token_ms + self.elapsed_ms() - self.ttft_ms)
        if self.job.pooling is not None:  # vectors are all prefill
            first_token_ms = end_ms
        preemptions = sum([choice.preemptions for choice in timings.values()])
        return Timings(queue_ms, first_token_ms - queue_ms, end_ms - first_token_ms, preemptions)

    # --- frames: each takes the next sequence number ------------------------------------------------------------------

    def accepted(self, settings: WorkerSettings, revision: str, counted_by: CountedBy) -> bytes:
        """Return the first frame."""
        job = self.job
        names = (settings.worker_id, settings.pool, settings.provider, settings.region)
        how = (self.queue_ms, settings.tier, revision, counted_by)
        return self.add(Accepted(job.request_id, job.attempt, 0, *names, *how))

    def dropped(self, fields: tuple[str, ...]) -> bytes:
        """Return a frame that names the dropped fields."""
        return self.add(Dropped(self.job.request_id, self.job.attempt, len(self.frames), fields))

    def tokens(
        self,
        index: int,
        token_ids: tuple[int, ...],
        text: str,
        finish_reason: str | None,
        logprobs: tuple[TokenLogprob, ...] | None,
    ) -> bytes:
        """Return a frame with one step's output for one choice, and count its tokens."""
        if token_ids:
            self.completion_tokens += len(token_ids)
            self.made[index] += len(token_ids)
            if self.ttft_ms is None:
                self.ttft_ms = self.elapsed_ms()
        job = self.job
        return self.add(
            Tokens(job.request_id, job.attempt, len(self.frames), index, token_ids, text, finish_reason, logprobs)
        )

    def deltas(self, output: ChatOutput) -> bytes:
        """Return a frame with an API's output for one choice, and count it: an estimate until reported at the end."""
        if output.parts and self.ttft_ms is None:
            self.ttft_ms = self.elapsed_ms()
        usage, index, job = output.usage, output.index, self.job
        self.made[index] += output.tokens
        if usage is not None and usage.counted_by == "provider":
            self._count(index, usage)
        self.completion_tokens = sum(self.made)
        reason = "content_filter" if output.is_filtered else output.finish_reason
        head = (job.request_id, job.attempt, len(self.frames), index)
        return self.add(Deltas(*head, output.parts, output.tokens, reason, usage))

    def _count(self, index: int, usage: ChatUsage) -> None:
        """Count a finished choice. Each choice was a separate request, so each paid for the whole prompt."""
        self.made[index] = usage.completion_tokens
        self.prompt_tokens = usage.prompt_tokens + (self.prompt_tokens if self.provided else 0)
        self.cached_tokens += min(usage.cached_tokens, usage.prompt_tokens)
        self.provided += 1

    @property
    def is_counted_by_provider(self) -> bool:
        """True once the API has returned counts for every choice."""
        asked = self.job.answers - sum(point.finish_reason is not None for point in self.job.resume)
        return self.provided == asked

    def prompt_logprobs(self, index: int, logprobs: tuple[PromptLogprob, ...]) -> bytes:
        """Return a frame with log-probabilities of prompt tokens."""
        job = self.job
        frame = Tokens(job.request_id, job.attempt, len(self.frames), index, (), "", prompt_logprobs=logprobs)
        return self.add(frame)

    def vector(self, index: int, values: bytes) -> bytes:
        """Return the frame that answers one input."""
        job = self.job
        return self.add(Vector(job.request_id, job.attempt, len(self.frames), index, values))

    def finished(self) -> bytes:
        """Return the last frame of an attempt whose choices have all ended."""
        return self.add(
            Finished(
                self.job.request_id,
                self.job.attempt,
                len(self.frames),
                cancelled=self.was_cancelled,
                prompt_tokens=self.prompt_tokens,
                cached_tokens=self.cached_tokens,
                completion_tokens=self.completion_tokens,
                ttft_ms=self.ttft_ms or 0.0,
                timings=self.engine_timings(),
            )
        )

    def failed(self, code: str, message: str, *, retryable: bool, param: str | None) -> bytes:
        """Return the last frame of an attempt that ends without an answer."""
        return self.add(
            Failed(
                self.job.request_id,
                self.job.attempt,
                len(self.frames),
                code,
                message,
                retryable=retryable,
                param=param,
                completion_tokens=self.completion_tokens,
                timings=self.engine_timings(),
            )
        )


# --- usage ------------------------------------------------------------------------------------------------------------
#
# The ledger's record of one attempt.

OUTBOX_RECORDS: Final = 2048  # records not yet stored; from this number on the worker pulls nothing
Outcome = Literal["ok", "cancelled", "failed"]


def attempt_record(
    settings: WorkerSettings, engine: AnyEngine, attempt: Attempt, outcome: Outcome, error_code: str | None
) -> AttemptRecord:
    """Return the record of an attempt that ends now."""
    timings = attempt.engine_timings()
    return AttemptRecord(
        v=PROTOCOL_VERSION,
        request_id=attempt.job.request_id,
        attempt=attempt.job.attempt,
        worker_id=settings.worker_id,
        pool=settings.pool,
        provider=settings.provider,
        region=settings.region,
        tier=settings.tier,
        engine=engine.name,
        model=attempt.job.model,
        started_unix_ms=attempt.started_unix_ms,
        outcome=outcome,
        error_code=error_code,
        prompt_tokens=attempt.prompt_tokens,
        cached_tokens=attempt.cached_tokens,
        completion_tokens=attempt.completion_tokens,
        queue_ms=attempt.queue_ms,
        ttft_ms=attempt.ttft_ms,
        total_ms=attempt.elapsed_ms(),
        usd_per_hour=settings.usd_per_hour,
        resumed_tokens=sum(point.used_tokens for point in attempt.job.resume),
        received_unix_ms=attempt.job.accepted_unix_ms,
        counted_by=_counted_by(engine, attempt),
        rescue=rescue_of(attempt.job, engine.takes),
        **(asdict(timings) if timings else {}),
        **(asdict(attempt.job.origin) if attempt.job.origin else {}),
    )


def _counted_by(engine: AnyEngine, attempt: Attempt) -> CountedBy:
    if engine.takes != TAKES_MESSAGES:
        return engine.counted_by
    return "provider" if attempt.is_counted_by_provider else "estimate"


# --- replay -----------------------------------------------------------------------------------------------------------
#
# Recently ended attempts, kept so that lost frames can be sent again.

KEEP_S: Final = 30.0
KEEP_ATTEMPTS: Final = 4096
KEEP_BYTES: Final = 64 * 1024 * 1024  # of encoded frames


class RecentAttempts:
    """Ended attempts by id, oldest first. Above any of the three bounds the oldest are dropped."""

    def __init__(
        self,
        clock_s: Callable[[], float] | None = None,
        *,
        keep_attempts: int = KEEP_ATTEMPTS,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        """``clock_s`` defaults to the monotonic clock."""
        self._clock_s = clock_s or time.monotonic
        self._keep_attempts = keep_attempts
        self._keep_bytes = keep_bytes
        self._ended: dict[str, tuple[float, Attempt]] = {}  # id → (when it ended, the attempt)
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, attempt: Attempt) -> None:
        """Keep an attempt that has just ended."""
        self._ended[attempt.id] = (self._clock_s(), attempt)
        self._bytes += attempt.replay_bytes
        self._drop_oldest()

    def get(self, id_: str) -> Attempt | None:
        """Return an attempt that ended within KEEP_S, or None."""
        self._drop_oldest()
        entry = self._ended.get(id_)
        return entry[1] if entry else None

    def _drop_oldest(self) -> None:
        while self._ended:
            id_, (ended_s, attempt) = next(iter(self._ended.items()))
            is_young = self._clock_s() - ended_s <= KEEP_S
            if is_young and len(self._ended) <= self._keep_attempts and self._bytes <= self._keep_bytes:
                return
            del self._ended[id_]
            self._bytes -= attempt.replay_bytes
