"""Runs jobs: turns a delivery of the queue into an engine request, and the engine's outputs into frames.

The worker acknowledges a job when it accepts it: the gateway gets the "accepted" frame and watches over the job from
then on. If the acknowledgement is lost, the queue delivers the job again. This worker then recognizes it and does not
run it twice; on another worker, the gateway stops it. Every accepted attempt ends exactly once, in `_end`: it sends its
last frame, returns its credit and leaves a usage record.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from engine.types import Refusal, SequenceOutput
from pool_worker.attempt import Attempt, Outcome, RecentAttempts, attempt_id, attempt_record
from pool_worker.breaker import Breaker
from pool_worker.credit import Credit
from pool_worker.engines.base import AnyEngine
from pool_worker.engines.chat import ChatOutput
from pool_worker.engines.server_busy import Busy
from pool_worker.generation import chat_request, engine_request
from pool_worker.publisher import Publisher
from pool_worker.settings import WorkerSettings
from protocol import subjects
from protocol.errors import BusError, ErrorCode, ProtocolError
from protocol.generation import PromptLogprob as EnginePromptLogprob
from protocol.job import TAKES_MESSAGES, CountedBy, Failed, Job, JobHead, Resend, Revision, encode, unpack_token_ids
from protocol.nats.bus import Bus
from protocol.nats.objects import get_object, unseal
from protocol.nats.outbox import Outbox
from protocol.nats.pull import Delivery

if TYPE_CHECKING:
    from pool_worker.traces import AttemptTraces

PROMPT_FETCH_LIMIT_S: Final = 10.0
PROMPT_LOGPROBS_PER_FRAME: Final = 64  # with 20 candidates each, about 50 kB
DRAINING_MESSAGE: Final = "the worker is shutting down"

log = logging.getLogger(__name__)


class Executor:
    """All attempts of one worker."""

    def __init__(
        self,
        settings: WorkerSettings,
        bus: Bus,
        engine: AnyEngine,
        *,
        credit: Credit,
        publisher: Publisher,
        outbox: Outbox,
        revisions: Mapping[str, Revision],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        on_end: Callable[[Attempt], None],
        on_pause: Callable[[], None],
        traces: "AttemptTraces | None" = None,
    ) -> None:
        """Make an executor without jobs; ``revisions`` are those of its models.

        ``spawn`` runs a coroutine in a supervised task. ``on_end`` gets each accepted attempt after its end, when its
        credit is free again. ``on_pause`` is called when the breaker opens or closes. ``traces`` makes spans, if set.
        """
        self._settings = settings
        self._adapters = settings.adapters
        self._revisions = revisions
        self._bus = bus
        self._engine = engine
        self._credit = credit
        self._publisher = publisher
        self._outbox = outbox
        self._spawn = spawn
        self._on_end = on_end
        self._traces = traces
        is_chat = engine.takes == TAKES_MESSAGES
        self._send: Callable[[Attempt, Any], None] = self._send_deltas if is_chat else self._send_tokens
        self._counted_by: CountedBy = "provider" if engine.takes == TAKES_MESSAGES else engine.counted_by
        self.jobs_taken = 0  # accepted since the start
        self.batch_jobs_taken = 0  # accepted batch jobs
        self.tokens_made = 0
        self._held: dict[str, Attempt] = {}  # pulled and not ended
        self._waiting: deque[Attempt] = deque()  # attempts of `_held` without credit
        self._fetches: dict[str, asyncio.Task[None]] = {}  # id → fetch of its prompt
        self._recent = RecentAttempts()
        self.breaker = Breaker(self._held.values, credit.capacity.max_sequences, on_pause)
        self._is_draining = False
        self._is_starting = False
        self.is_idle = asyncio.Event()  # nothing is held
        self.is_idle.set()

    @property
    def held(self) -> Sequence[Attempt]:
        """The attempts that have not ended."""
        return tuple(self._held.values())

    @property
    def is_draining(self) -> bool:
        """True once new jobs are handed back."""
        return self._is_draining

    @property
    def waiting_jobs(self) -> int:
        """Number of accepted jobs that do not fit into the engine yet."""
        return len(self._waiting)

    @property
    def has_waiting_interactive(self) -> bool:
        """True while an interactive job is among them, which other jobs must not overtake."""
        return any(not attempt.is_batch for attempt in self._waiting)

    # --- jobs arrive --------------------------------------------------------------------------------------------------

    def knows(self, job: Job) -> bool:
        """Report whether this worker runs this attempt, or ran it recently."""
        id_ = attempt_id(job.request_id, job.attempt)
        return id_ in self._held or self._recent.get(id_) is not None

    def offer(self, job: Job, delivery: Delivery) -> bool:
        """Take a pulled job: run it, let it wait for credit, hand it back, or decline it.

        Return whether it was accepted, and so will reach ``on_end``.
        """
        id_ = attempt_id(job.request_id, job.attempt)
        is_accepted = False
        if self._recognize(id_, job, delivery):
            return is_accepted
        if 0 < job.deadline_unix_ms < time.time() * 1000:
            self.decline(job, delivery, ErrorCode.DEADLINE_EXCEEDED, "the deadline passed while the request was queued")
        elif self._is_draining:
            self._publisher.nak(delivery)
        else:
            self._accept(job, delivery)
            is_accepted = True
        self._publisher.wake()
        return is_accepted

    def _recognize(self, id_: str, job: Job, delivery: Delivery) -> bool:
        """Report whether this worker runs or ran this attempt; if so, send its frames again.

        The queue lost the acknowledgement or the gateway lost frames.
        """
        attempt = self._held.get(id_) or self._recent.get(id_)
        if attempt is None:
            return False
        self._publisher.ack(delivery)
        self._replay(attempt, 0, job.reply_subject)
        self._publisher.wake()
        return True

    def decline(self, job: Job | JobHead, delivery: Delivery, code: ErrorCode, message: str) -> None:
        """Take a job that no worker will run off the queue and send its gateway the reason."""
        frame = Failed(job.request_id, job.attempt, 0, code, message, retryable=False)
        self._publisher.send(job.reply_subject, encode(frame))
        self._publisher.ack(delivery)
        self._publisher.wake()

    def _accept(self, job: Job, delivery: Delivery) -> None:
        attempt = Attempt(job, delivery, self._credit.cost_of(job))
        self._credit.note(attempt.cost)
        self._held[attempt.id] = attempt
        self.jobs_taken += 1
        self.batch_jobs_taken += attempt.is_batch
        self.is_idle.clear()
        frame = attempt.accepted(self._settings, self._revisions[job.model].weights, self._counted_by)
        self._publisher.send(job.reply_subject, frame)
        self._publisher.ack(delivery)  # from here on the gateway watches over it
        self._waiting.append(attempt)
        self._start_what_fits()

    def _start_what_fits(self) -> None:
        # Ending an attempt frees credit and calls this again: without the guard, many expired jobs recurse deeply.
        if self._is_starting:
            return
        self._is_starting = True
        try:
            self._start_waiting()
        finally:
            self._is_starting = False

    def _start_waiting(self) -> None:
        while self._waiting and not self._is_draining and not self.breaker.is_open(time.monotonic()):
            attempt = min(self._waiting, key=lambda attempt: attempt.is_batch)  # the oldest; batch jobs let others pass
            if not self._credit.fits(attempt.cost, is_batch=attempt.is_batch):
                return
            self._waiting.remove(attempt)
            if 0 < attempt.job.deadline_unix_ms < time.time() * 1000:
                self._fail(attempt, ErrorCode.DEADLINE_EXCEEDED, "the deadline passed on the worker", retryable=False)
                continue
            self._credit.take(attempt.cost)
            attempt.holds_credit = True
            self._start(attempt)

    def _start(self, attempt: Attempt) -> None:
        job, takes_chat = attempt.job, self._engine.takes == TAKES_MESSAGES
        name = job.chat_object if takes_chat else job.prompt_object
        if name is not None:
            self._fetches[attempt.id] = self._spawn(self._fetch_and_submit(attempt, name))
        else:
            self._submit(attempt, (job.chat or b"") if takes_chat else job.prompt_ids)

    async def _fetch_and_submit(self, attempt: Attempt, prompt_object: str) -> None:
        packed, why_not = None, ""
        try:
            async with asyncio.timeout(PROMPT_FETCH_LIMIT_S):
                packed = await get_object(self._bus, subjects.PROMPTS_BUCKET, prompt_object)
            if attempt.job.object_key:
                packed = unseal(packed, attempt.job.object_key, prompt_object)
        except (BusError, ProtocolError, TimeoutError) as error:
            why_not = f"the prompt could not be fetched: {str(error) or 'timed out'}"
        if self._fetches.pop(attempt.id, None) is None:
            return  # already ended: asyncio.wait_for of Python 3.11 loses a cancellation that races with the result
        if packed is None:
            self._fail(attempt, ErrorCode.INTERNAL_ERROR, why_not, retryable=True)
        else:
            self._submit(attempt, packed)
        self._publisher.wake()

    def _submit(self, attempt: Attempt, packed: bytes) -> None:
        """Submit an attempt to the engine; ``packed`` holds the prompt's token ids or the conversation."""
        engine = self._engine
        try:
            if engine.takes == TAKES_MESSAGES:
                chat, dropped = engine.fitted(chat_request(attempt.id, attempt.job, packed, engine.honoured))
                submit = partial(engine.submit, chat)
                if dropped and attempt.live:
                    self._publisher.send(attempt.job.reply_subject, attempt.dropped(dropped))
            else:
                prompt_ids = unpack_token_ids(packed)
                request = engine_request(attempt.id, attempt.job, prompt_ids, self._adapters, engine.honoured)
                submit = partial(engine.submit, request)
        except ProtocolError as error:  # from a newer gateway: a newer worker may understand it
            self._fail(attempt, ErrorCode.INTERNAL_ERROR, str(error), retryable=True)
            return
        if not attempt.live:
            self._finish(attempt)
            return
        attempt.in_engine = True
        submit()

    # --- engine outputs -----------------------------------------------------------------------------------------------

    def take(self, outputs: Sequence[SequenceOutput]) -> None:
        """Turn the outputs of one engine step into frames."""
        for output in outputs:
            attempt = self._held.get(output.request_id)
            if attempt is None:
                continue  # already ended
            if output.timings is not None and output.index in attempt.live:
                attempt.timings[output.index] = output.timings
            reason = output.finish_reason
            if reason == "error":  # for the whole attempt, even if the named choice was complete
                self._fail_by_engine(attempt, output)
                continue
            if output.index not in attempt.live:
                continue
            if reason == "cancelled":
                attempt.was_cancelled = True
            elif output.vector is not None:
                self._publisher.send(attempt.job.reply_subject, attempt.vector(output.index, output.vector))
            else:
                self._send(attempt, output)
            if reason is not None:
                attempt.live.discard(output.index)
                if not attempt.live:
                    self._finish(attempt)
        self._publisher.wake()

    def _send_tokens(self, attempt: Attempt, output: SequenceOutput) -> None:
        if output.prompt_logprobs:
            self._send_prompt_logprobs(attempt, output.index, output.prompt_logprobs)
        if not (output.token_ids or output.text or output.finish_reason):
            return
        self.tokens_made += len(output.token_ids)
        if attempt.ttft_ms is None:
            attempt.cached_tokens = output.cached_tokens
        logprobs = None if output.logprobs is None else tuple(output.logprobs)
        frame = attempt.tokens(output.index, tuple(output.token_ids), output.text, output.finish_reason, logprobs)
        self._publisher.send(attempt.job.reply_subject, frame)

    def _send_deltas(self, attempt: Attempt, output: ChatOutput) -> None:
        self.tokens_made += output.tokens
        self._publisher.send(attempt.job.reply_subject, attempt.deltas(output))

    def _send_prompt_logprobs(self, attempt: Attempt, index: int, logprobs: Sequence[EnginePromptLogprob]) -> None:
        for start in range(0, len(logprobs), PROMPT_LOGPROBS_PER_FRAME):
            wire = tuple(logprobs[start : start + PROMPT_LOGPROBS_PER_FRAME])
            self._publisher.send(attempt.job.reply_subject, attempt.prompt_logprobs(index, wire))

    def _fail_by_engine(self, attempt: Attempt, output: SequenceOutput) -> None:
        message = output.error or "the engine gave no reason"
        if isinstance(output, Busy):
            self.breaker.asked_to_wait(output.wait_s, message, time.monotonic())
            self._fail(attempt, ErrorCode.ENGINE_BUSY, message, retryable=True)
        elif isinstance(output, Refusal):
            code = ErrorCode.GRAMMAR_TOO_COMPLEX if output.is_too_complex else ErrorCode.INVALID_REQUEST
            # An earlier worker accepted the job, so one with wider limits may again.
            may_retry = attempt.job.attempt > 1 and not output.is_too_complex
            self._fail(attempt, code, message, retryable=may_retry, param=output.param)
        else:
            if attempt.ttft_ms is None and self._settings.asks_server:
                self.breaker.failed(attempt.job.request_id, message, time.monotonic())
            self._fail(attempt, ErrorCode.ENGINE_ERROR, message, retryable=True)

    # --- gateway requests ---------------------------------------------------------------------------------------------

    def cancel(self, request_id: str, attempt_number: int) -> None:
        """Stop an attempt. Ignores unknown and ended ones."""
        attempt = self._held.get(attempt_id(request_id, attempt_number))
        if attempt is None:
            return
        if attempt.in_engine:
            self._engine.cancel(attempt.id)  # the attempt ends with the next step, with exact counts
        else:
            attempt.was_cancelled = True
            self._finish(attempt)
            self._publisher.wake()

    def resend(self, request: Resend) -> None:
        """Send an attempt's frames again."""
        id_ = attempt_id(request.request_id, request.attempt)
        attempt = self._held.get(id_) or self._recent.get(id_)
        if attempt is not None:
            self._replay(attempt, request.from_seq, request.reply_subject)
        else:
            message = "this worker does not know the attempt"
            code = ErrorCode.UNKNOWN_ATTEMPT
            frame = Failed(request.request_id, request.attempt, request.from_seq, code, message, retryable=True)
            self._publisher.send(request.reply_subject, encode(frame))
        self._publisher.wake()

    def _replay(self, attempt: Attempt, from_seq: int, reply_subject: str) -> None:
        for frame in attempt.frames[max(0, from_seq) :]:
            self._publisher.send(reply_subject, frame)

    # --- shutdown -----------------------------------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        """Hand back every job that arrives from now on."""
        self._is_draining = True

    def hand_back(self, attempts: Sequence[Attempt]) -> None:
        """End attempts so that their gateways, which hold all tokens, resume them on other workers."""
        for attempt in attempts:
            self._fail(attempt, ErrorCode.WORKER_DRAINING, DRAINING_MESSAGE, retryable=True)

    def hand_back_waiting(self) -> None:
        """Hand back jobs that have not reached the engine: its server takes no requests for now."""
        for attempt in tuple(self._waiting):
            self._fail(attempt, ErrorCode.ENGINE_BUSY, "the worker's server takes no requests for now", retryable=True)

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """End every attempt so that its gateway retries it on another worker."""
        self.stop_accepting()
        for attempt in self.held:
            self._fail(attempt, code, message, retryable=True)

    def abandon(self, reply_subject: str) -> None:
        """End the attempts of a gateway that is gone."""
        orphans = [attempt for attempt in self.held if attempt.job.reply_subject == reply_subject]
        log.warning("no listener on %s: stopping %d jobs", reply_subject, len(orphans))
        for attempt in orphans:
            self._fail(attempt, ErrorCode.GATEWAY_LOST, "the gateway is gone", retryable=True)

    # --- the end of an attempt ----------------------------------------------------------------------------------------

    def _finish(self, attempt: Attempt) -> None:
        self._end(attempt, attempt.finished(), "cancelled" if attempt.was_cancelled else "ok", None)

    def _fail(
        self, attempt: Attempt, code: ErrorCode, message: str, *, retryable: bool, param: str | None = None
    ) -> None:
        if attempt.in_engine:
            self._engine.cancel(attempt.id)
        frame = attempt.failed(code, message, retryable=retryable, param=param)
        self._end(attempt, frame, "failed", code)

    def _end(self, attempt: Attempt, last_frame: bytes, outcome: Outcome, error_code: str | None) -> None:
        del self._held[attempt.id]
        if (fetch := self._fetches.pop(attempt.id, None)) is not None:
            fetch.cancel()
        self._publisher.send(attempt.job.reply_subject, last_frame)
        self._publisher.wake(at_once=True)
        record = attempt_record(self._settings, self._engine, attempt, outcome, error_code)
        # Another worker may run the same attempt until it is stopped, and then leaves a record too.
        self._outbox.put(f"{attempt.id}.{self._settings.worker_id}", encode(record))
        if self._traces is not None:
            self._traces.ended(attempt, outcome, error_code)
        self._recent.add(attempt)
        if attempt.holds_credit:
            self._credit.give_back(attempt.cost)
        elif attempt in self._waiting:
            self._waiting.remove(attempt)
        self._start_what_fits()
        if not self._held:
            self.is_idle.set()
        self.breaker.ended(attempt, time.monotonic())
        self._on_end(attempt)
