"""The life cycle of one request, from the queue to its record: its state, and how each event changes it."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, Protocol

from msgspec import structs

from db.accounts.masking import masked
from gateway.admission.control import Ticket
from gateway.dispatch.attempt import MAX_BUSY_FAILURES, AttemptLog, CurrentAttempt
from gateway.dispatch.choices import choices_of, plausible_prompt, why_implausible
from gateway.dispatch.hosted import HostedSlot
from gateway.errors import Failure
from gateway.request.mailbox import Ended, Mailbox, StillWaiting
from gateway.request.request import Admission, PartialAnswer, QueuePosition
from gateway.settings import TimeoutSettings
from protocol.errors import ErrorCode
from protocol.job import (
    DROPPABLE,
    Accepted,
    Cancel,
    Deltas,
    Dropped,
    Failed,
    Finished,
    Frame,
    Heartbeat,
    Tokens,
    UnreadableFrame,
    Vector,
)
from protocol.usage import RequestRecord

# --- states -----------------------------------------------------------------------------------------------------------
#
# The states of an admitted request and its transitions. Only this file changes states; a test checks ``TRANSITIONS``
# against the drawing.
#
# QUEUED ──> RUNNING      a worker accepted the attempt
# QUEUED ──> QUEUED       the attempt failed, vanished or moves to another pool: attempt + 1
# QUEUED ──> STOPPING     the client left, or a deadline passed: a worker may have just pulled the job
# QUEUED ──> ENDED        refused by the queue, failed for good, attempts exhausted, or only the final frame was lost
# RUNNING ──> QUEUED      the worker failed, is silent or lost: attempt + 1, which continues the held output
# RUNNING ──> STOPPING    the client left, or a deadline passed: wait for the worker's exact token counts
# RUNNING ──> ENDED       finished, failed for good, attempts exhausted
# STOPPING ──> ENDED      the counts arrived, the worker is lost, or the time for them is up
# ENDED ──> SETTLED       the client's HTTP status is known too: exactly one record is published


class State(Enum):
    """State of a request; drawn above."""

    QUEUED = "queued"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"
    SETTLED = "settled"


TRANSITIONS: Final = {
    State.QUEUED: frozenset({State.RUNNING, State.QUEUED, State.STOPPING, State.ENDED}),
    State.RUNNING: frozenset({State.QUEUED, State.STOPPING, State.ENDED}),
    State.STOPPING: frozenset({State.ENDED}),
    State.ENDED: frozenset({State.SETTLED}),
    State.SETTLED: frozenset[State](),
}


# --- actions ----------------------------------------------------------------------------------------------------------
#
# Commands of a request to its dispatcher: the interface between the state machine and the bus.


class Actions(Protocol):
    """Commands of a request. None of them waits."""

    def publish(self, request: "OpenRequest", after_s: float) -> None:
        """Publish the current attempt after a pause."""
        ...

    def takers(self, request: "RequestState") -> Sequence[Heartbeat]:
        """Return the live workers that could run its next attempt."""
        ...

    def withdraw(self, request: "OpenRequest") -> None:
        """Delete the current attempt's job from the queue, if it is still there."""
        ...

    def accepted(self, request: "OpenRequest") -> None:
        """Note that a worker has accepted the current attempt."""
        ...

    def attempt_over(self, request: "OpenRequest") -> None:
        """Note that the current attempt has ended."""
        ...

    def cancel(self, worker_id: str, cancel: Cancel) -> None:
        """Tell a worker to stop an attempt."""
        ...

    def fence_out(self, worker_id: str, frame: Frame, now_s: float) -> None:
        """Handle a frame of an attempt that no request waits for."""
        ...

    def request_resend(self, request: "OpenRequest", worker_id: str, from_seq: int) -> None:
        """Ask a worker to resend frames of the current attempt."""
        ...

    def record_lost_attempt(self, request: "OpenRequest", outcome: str, code: str | None, now_s: float) -> None:
        """Publish the usage record of the current attempt in place of its lost worker."""
        ...

    def record(self, request: "OpenRequest") -> asyncio.Future[None]:
        """Publish the record of an ended request before its answer; the future is done once it is stored."""
        ...

    def ended(self, request: "OpenRequest") -> None:
        """Release the resources of a request; its counts are final."""
        ...

    def settled(self, request: "OpenRequest") -> None:
        """Publish the final record of a request, unless another gateway continues it."""
        ...


# --- request state ----------------------------------------------------------------------------------------------------
#
# The data of one open request, which its state machine changes and other parts read.


class RequestState:
    """The data of an open request. Only ``OpenRequest`` changes it."""

    def __init__(
        self,
        ticket: Ticket,
        timeouts: TimeoutSettings,
        max_attempts: int,
        actions: Actions,
        now_s: float,
        *,
        mailbox: Mailbox | None = None,
        intent: asyncio.Future[None] | None = None,
    ) -> None:
        """``mailbox``: receives its events; default: a new one. ``intent``: of a stream, done once it is stored."""
        self.admission = admission = ticket.admission
        self.request_id, self.prompt_tokens = admission.request_id, admission.prompt.tokens
        self.ticket = ticket
        self.mailbox = Mailbox() if mailbox is None else mailbox
        self.state = State.QUEUED
        self.current = CurrentAttempt(1, queued_s=now_s, last_frame_s=now_s)
        self.log = AttemptLog(max_attempts)
        self.accepted: Accepted | None = None  # of the last accepted attempt
        self.published_s: float | None = None  # when the first attempt was first published
        self.choices = choices_of(admission)
        self._unreceived_tokens = 0  # of a stopped or failed attempt: reported by its worker, within plausible bounds
        self.cached_tokens = 0
        self.accepted_s: float | None = None
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        self.outcome = "ok"  # "ok" | "cancelled" | "failed"; final once ENDED
        self.failure: Failure | None = None
        self.row = intent  # done: the ledger will have a row; None: not started
        self.record: RequestRecord | None = None  # once published
        self.http_status: int | None = None  # sent to the client; None: none
        self.dropped: frozenset[str] = frozenset()  # fields that the pools of its answer ignored
        self.hosted_wait: str | None = None  # why it is not at a hosted pool: gateway.dispatch.hosted
        self.is_closed = False  # the reader of its answer is gone
        self.on_end: Callable[[Ended], None] | None = None  # called when the client's outcome is known
        self._timeouts = timeouts
        self._actions = actions
        self._queue_wait = QueueWaitBudget(admission.arrival.queue_wait_s)
        self._last_event_s = now_s
        self._stop_deadline_s = float("inf")
        self._cancel_sent_s = float("-inf")

    @property
    def attempt(self) -> int:
        """Number of the current attempt, from 1."""
        return self.current.number

    @property
    def worker_id(self) -> str | None:
        """Worker of the current attempt; None while it is queued."""
        return self.current.worker_id

    @property
    def queue_deadline_s(self) -> float:
        """Time by which a worker must have accepted the current attempt (monotonic clock)."""
        total_s = self.admission.arrival.received_s + self._timeouts.total_s
        return min(self.current.queued_s + self._queue_wait.left_s, total_s, self.admission.arrival.deadline_s)

    @property
    def completion_tokens(self) -> int:
        """Output tokens over all choices and attempts; exact once ENDED."""
        return self.choices.held_tokens() + self._unreceived_tokens

    @property
    def attempt_tokens(self) -> int:
        """Output tokens received from the current attempt."""
        return self.choices.held_tokens() - self.current.tokens_before

    @property
    def is_over(self) -> bool:
        """True if its counts are final."""
        return self.state in {State.ENDED, State.SETTLED}

    def takers(self) -> Sequence[Heartbeat]:
        """Return the live workers that could run the next attempt."""
        return self._actions.takers(self)

    def waits_for_worker(self, attempt: int) -> bool:
        """Return whether this attempt is the current one and not yet accepted."""
        return self.state is State.QUEUED and self.current.number == attempt


# --- failure rules ----------------------------------------------------------------------------------------------------
#
# Rules that turn a worker's failure into another attempt, or into the client's error.

VANISHED: Final = Failure(ErrorCode.JOB_VANISHED, "the job vanished from the queue")
BROKEN_OFF_TWICE: Final = (
    "The server broke off the answer twice, and Spillway does not pay for a third try. Check the server of this pool, "
    "or send the request again."
)
CLOCK_SKEW_S: Final = 1.0  # between a gateway and a worker


def is_premature(frame: Failed, queue_deadline_s: float, now_s: float) -> bool:
    """Return whether a worker ended the wait too early because its clock is wrong: others may accept the job."""
    return frame.code == ErrorCode.DEADLINE_EXCEEDED and now_s < queue_deadline_s - CLOCK_SKEW_S


def client_failure(frame: Failed, admission: Admission, now_s: float) -> Failure:
    """Return the failure that the client sees."""
    code = _known_code(frame.code)
    if code is ErrorCode.DEADLINE_EXCEEDED and now_s < admission.arrival.deadline_s - CLOCK_SKEW_S:
        code = ErrorCode.QUEUE_WAIT_TIMEOUT  # the job's deadline is that of the queue wait
    # The engine knows only token ids; the client knows the field that they were encoded from.
    param = admission.prompt.param if frame.param == "prompt_ids" else frame.param
    return Failure(code, frame.message, param)


def terminal_failure(request: "OpenRequest") -> Failure | None:
    """Return why a request gets no further attempt after a failed one, or None."""
    if request.log.is_busy_too_often:
        return Failure(ErrorCode.WAIT_TOO_LONG, f"The servers of this model asked to wait {MAX_BUSY_FAILURES} times.")
    if request.log.exhausted:
        return Failure(ErrorCode.ATTEMPTS_EXHAUSTED, request.log.why(request.attempt))
    if request.log.is_repeated and not _leaves_pool(request):
        return Failure(ErrorCode.ATTEMPTS_EXHAUSTED, f"{request.log.why(request.attempt)}. {BROKEN_OFF_TWICE}")
    if request.choices.is_encoded and not request.admission.prompt.stream:
        if not request.log.drop():
            return Failure(ErrorCode.ATTEMPTS_EXHAUSTED, f"{request.log.why(request.attempt)}. {BROKEN_OFF_TWICE}")
        drop_answer(request)  # the client has not received any of it
    return None if request.choices.can_resume else answer_cut(request)


def answer_cut(request: "OpenRequest") -> Failure:
    """Return the failure of a stream that no live worker can resume."""
    why = f": {failures[-1].reason.removesuffix('.')}" if (failures := request.log.failures) else ""
    end = "Text already sent is not repeated: send the request again."
    message = f"The stream was interrupted and no worker can resume it{why}. {end}"
    return Failure(ErrorCode.ANSWER_CUT, message)


def _leaves_pool(request: "OpenRequest") -> bool:
    """Avoid all workers of the pool whose server repeated a failure; return False if no other pool is left."""
    failed, takers = request.log.failed_pools, request.takers()
    for beat in takers:
        if beat.pool in failed:
            request.log.avoid_worker(beat.worker_id)
    return any(beat.takes_jobs and beat.pool not in failed for beat in takers)


def is_excused(request: "OpenRequest", code: str) -> bool:
    """Return whether a failed attempt does not count: it generated no token, and no attempt failed at another pool.

    A server that refuses everything takes jobs faster than healthy ones. A request that fails everywhere still ends:
    failures at its last pool count.
    """
    current, log = request.current, request.log
    if code != ErrorCode.ENGINE_ERROR or current.accepted is None or request.attempt_tokens or current.answered_inputs:
        return False
    failed = {current.accepted.pool, *log.failed_pools}
    return any(beat.takes_jobs and beat.pool not in failed for beat in request.takers())


def may_run_elsewhere(request: "OpenRequest", timeout: Failure) -> bool:
    """Return whether a timeout ends only the attempt, because another worker is free."""
    if timeout.code not in {ErrorCode.FIRST_TOKEN_TIMEOUT, ErrorCode.INTER_TOKEN_TIMEOUT}:
        return False
    silent = {request.worker_id, *request.log.avoid}
    takers = request.takers()
    return any(beat.takes_jobs and beat.free_sequences and beat.worker_id not in silent for beat in takers)


def why_waited_in_vain(request: "OpenRequest", timeout: Failure) -> Failure:
    """Return why a request waited until its time limit: its servers asked to wait, else ``timeout``."""
    takers = request.takers()
    waits_ms = [beat.paused.wait_ms for beat in takers if beat.paused is not None and beat.paused.wait_ms]
    all_wait = bool(takers) and len(waits_ms) == len(takers)
    if not all_wait and not request.log.was_asked_to_wait:
        return timeout
    retry_after_s = math.ceil(min(waits_ms) / 1000) if all_wait else None
    message = "The servers of this model asked to wait, and none accepted the request in time."
    return Failure(ErrorCode.WAIT_TOO_LONG, message, retry_after_s=retry_after_s)


def drop_answer(request: "OpenRequest") -> None:
    """Drop the held output: the next attempt restarts the answer."""
    request.choices.clear()
    request.current.tokens_before = 0
    request.mailbox.drop(request.request_id)


def _known_code(code: str) -> ErrorCode:
    try:
        return ErrorCode(code)
    except ValueError:  # from a worker of a newer release
        return ErrorCode.INTERNAL_ERROR


def too_much_unread(admission: Admission) -> Failure:
    """Return the failure of a request whose unread answer exceeds the buffer."""
    if admission.prompt.stream:
        return Failure(ErrorCode.SLOW_CLIENT, "The client reads too slowly, and the buffer is full.")
    message = (
        "The answer is larger than the gateway can buffer for one key or team."
        " Request fewer tokens, choices or log-probabilities, or a stream."
    )
    return Failure(ErrorCode.ANSWER_TOO_LARGE, message)


# --- deadlines --------------------------------------------------------------------------------------------------------
#
# Time limits of a request in each state; each has its own error.

RESCUE_QUEUE_WAIT_S: Final = 5.0  # for later attempts, even if the first used up the whole queue wait
WITHDRAW_LINGER_S: Final = 2.0  # for a worker that pulled the job at the last moment to report it
ACCEPT_LIMIT_S: Final = 1.0  # for a worker to accept a request that does not allow queuing
NEVER_S: Final = float("inf")
TIMER_SLACK_S: Final = 0.001  # timers may fire early by the clock's resolution


class DeadlineTimers:
    """Timers for client deadlines: exact, where the periodic sweep may be late."""

    def __init__(self) -> None:
        self._timers: dict[str, asyncio.TimerHandle] = {}  # by request

    def set(self, admission: Admission, now_s: float, call: Callable[[], None]) -> None:
        """Call ``call`` when the client's deadline has passed, if it set one."""
        if admission.arrival.deadline_s != NEVER_S:
            delay_s = admission.arrival.deadline_s - now_s + TIMER_SLACK_S
            self._timers[admission.request_id] = asyncio.get_running_loop().call_later(delay_s, call)

    def drop(self, request_id: str) -> None:
        """Cancel the timer of a request."""
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()


class QueueWaitBudget:
    """The remaining queue wait of a request, over all its attempts."""

    def __init__(self, limit_s: float) -> None:
        self.left_s = limit_s

    def spend(self, waited_s: float) -> None:
        """Deduct the wait of an attempt. Some always remains, for a rescue in mid-stream."""
        least_s = min(RESCUE_QUEUE_WAIT_S, self.left_s)
        self.left_s = max(least_s, self.left_s - waited_s)


def overdue(
    limits: TimeoutSettings,
    admission: Admission,
    attempt: CurrentAttempt,
    queue_deadline_s: float | None,
    now_s: float,
) -> Failure | None:
    """Return the exceeded limit, if any. ``queue_deadline_s``: None once a worker accepted the attempt."""
    if now_s >= admission.arrival.deadline_s:
        return Failure(ErrorCode.DEADLINE_EXCEEDED, "The client's deadline has passed.")
    if now_s - admission.arrival.received_s >= limits.total_s:
        return Failure(ErrorCode.TOTAL_TIMEOUT, f"The request took longer than {limits.total_s:g} s.")
    if queue_deadline_s is not None:
        return _overdue_in_queue(admission, attempt, queue_deadline_s, now_s)
    return _overdue_token(limits, attempt, now_s)


def _overdue_in_queue(admission: Admission, attempt: CurrentAttempt, deadline_s: float, now_s: float) -> Failure | None:
    """Return the limit exceeded while no worker has accepted the attempt."""
    waited_s = now_s - attempt.queued_s
    if now_s >= deadline_s:
        return Failure(ErrorCode.QUEUE_WAIT_TIMEOUT, f"No worker accepted the request within {waited_s:.1f} s.")
    if admission.do_not_queue and attempt.number == 1 and waited_s >= ACCEPT_LIMIT_S:
        return Failure(
            ErrorCode.NO_FREE_PLACE, "No worker accepted the request at once.", retry_after_s=1, is_wanted=True
        )
    return None


def _overdue_token(limits: TimeoutSettings, attempt: CurrentAttempt, now_s: float) -> Failure | None:
    """Return the limit exceeded while a worker runs the attempt."""
    if attempt.last_token_s is not None:
        if now_s - attempt.last_token_s >= limits.inter_token_s:
            return Failure(ErrorCode.INTER_TOKEN_TIMEOUT, f"No further token within {limits.inter_token_s:g} s.")
    elif attempt.accepted_s is not None and now_s - attempt.accepted_s >= limits.first_token_s:
        return Failure(ErrorCode.FIRST_TOKEN_TIMEOUT, f"No first token within {limits.first_token_s:g} s.")
    return None


# --- request ----------------------------------------------------------------------------------------------------------
#
# One admitted request: its state machine (drawn above), without any I/O.
#
# The fence drops frames of another attempt, frames of any worker but the attempt's first, and frames with a known
# ``seq``. A gap in ``seq`` makes the request ask the worker to resend from there; until the gap is filled, later frames
# are dropped, because they will be resent.

CANCEL_REPEAT_S: Final = 1.0
ATTEMPTS_UNKNOWN: Final = 1  # attempts that another gateway may have begun after the last known one


class OpenRequest(RequestState):
    """A request from admission to its end. Only used in the event loop."""

    def queue_position(self) -> QueuePosition | None:
        """Return the queue position; None once the request no longer waits for its first worker."""
        return self.ticket.queue_position()

    def _enter(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"request {self.request_id} cannot become {state.value}: it is {self.state.value}")
        self.state = state

    # --- jobs in the queue --------------------------------------------------------------------------------------------

    def publishing(self, now_s: float) -> None:
        """Note that the current attempt is being published."""
        self.published_s = self.published_s or now_s

    def stored(self, attempt: int, sequence: int) -> bool:
        """Note the sequence of an attempt's stored job; return whether the job is still needed."""
        if self.attempt == attempt and self.state in {State.QUEUED, State.RUNNING}:
            self.current.stream_sequence = self.current.stored_at = sequence
            return True
        return self.attempt == attempt and self.outcome == "ok"  # otherwise the caller deletes it

    def queue_lost(self) -> None:
        """Note that the queue server may have lost its memory: the job's sequence may now be another job's."""
        self.current.stream_sequence = None

    # --- record -------------------------------------------------------------------------------------------------------

    def notify_at_end(self, callback: Callable[[Ended], None] | None) -> None:
        """Call back once the client's outcome is known; None: no longer."""
        self.on_end = callback

    def note_status(self, status: int | None) -> None:
        """Note the HTTP status that the client received; None: none."""
        self.http_status = status

    def recorded(self, record: RequestRecord) -> None:
        """Note that the record is published."""
        self.record = record

    def close(self, status: int | None, now_s: float) -> None:
        """Note that the reader is gone. ``status``: as sent; None: the client disconnected before."""
        self.cancel(now_s)  # does nothing if it has ended
        self.mailbox.close()
        self.http_status = status
        self.is_closed = True
        self._settle_if_over()

    def settle_as_it_stands(self, failure: Failure, now_s: float) -> None:
        """Settle the request with its current counts, because the process ends."""
        self.fail(failure, now_s)  # does nothing if it has ended
        # A complete answer counts as one even if a slow client has not read all of it.
        self.http_status = self.http_status or (200 if self.outcome == "ok" else 503)
        self.is_closed = True
        if self.state is State.STOPPING:  # stop waiting for the exact counts
            self._close(now_s)
        else:
            self._settle_if_over()

    def _settle_if_over(self) -> None:
        if self.state is State.ENDED and self.is_closed:
            self._enter(State.SETTLED)
            self._actions.settled(self)

    def rows_stored(self) -> Sequence[asyncio.Future[None]]:
        """Return the futures to await before the client gets a good answer, so that its row survives any crash."""
        self.row = self.row or self._actions.record(self)
        return (self.row,)

    def resume(self, partial: PartialAnswer, now_s: float) -> None:
        """Continue from the output that another gateway received."""
        self.choices.revision = partial.revision
        for frame in partial.frames:
            if (reason := self.choices.take(frame)) is not None:
                self._end("failed", Failure(ErrorCode.INTERNAL_ERROR, reason), now_s)
                return
            self.mailbox.put_tokens(frame)
        if self.choices.are_complete():  # only the final frame was lost
            self._end("ok", None, now_s)
            return
        self.current.number = partial.attempt + ATTEMPTS_UNKNOWN
        self.log.add(self.current, ErrorCode.GATEWAY_LOST, "the request's gateway stopped", 0)
        held = self.choices.held_tokens()
        self.current = CurrentAttempt(self.attempt + 1, now_s, now_s, held, self.choices.is_encoded, is_rescue=True)
        self.ticket.leave_queue()  # for the resume lane
        self._actions.publish(self, 0.0)

    # --- frames -------------------------------------------------------------------------------------------------------

    def on_frame(self, worker_id: str, frame: Frame, now_s: float) -> None:
        """Handle one frame. Called for every token, so the usual case comes first."""
        current = self.current
        if (
            frame.seq == current.next_seq
            and frame.attempt == current.number
            and worker_id == current.worker_id
            and self.state is State.RUNNING
        ):
            current.last_frame_s = now_s
            self._take(worker_id, frame, now_s)
            return
        self._on_unusual_frame(worker_id, frame, now_s)

    def _on_unusual_frame(self, worker_id: str, frame: Frame, now_s: float) -> None:
        is_anothers = self.worker_id is not None and worker_id != self.worker_id
        if self.is_over or frame.attempt != self.attempt or is_anothers:
            self._actions.fence_out(worker_id, frame, now_s)
            return
        self.current.last_frame_s = now_s
        self.current.probes = 0
        if self.state is State.STOPPING:
            self._on_frame_while_stopping(worker_id, frame, now_s)
        elif isinstance(frame, Failed) and frame.code == ErrorCode.UNKNOWN_ATTEMPT:
            self._attempt_failed(ErrorCode.WORKER_LOST, "the worker no longer knows the request", now_s)
        elif frame.seq == self.current.next_seq:
            if self.state is State.QUEUED and not isinstance(frame, Accepted | Failed):
                self._attempt_failed(
                    ErrorCode.ENGINE_ERROR, "the worker sent output without accepting the request", now_s
                )
            else:
                self._take(worker_id, frame, now_s)
        elif frame.seq > self.current.next_seq and self.current.should_request_resend(now_s):
            self._actions.request_resend(self, worker_id, self.current.next_seq)

    def _take(self, worker_id: str, frame: Frame, now_s: float) -> None:
        self.current.next_seq += 1
        self.current.gap_since_s = None
        if isinstance(frame, (Tokens, Deltas)):
            reason = self.choices.add(frame) if isinstance(frame, Tokens) else self.choices.add_deltas(frame)
            if reason is None:
                self._on_tokens(frame, now_s)
        elif isinstance(frame, Vector):
            reason = self.choices.add_vector(frame)
            if reason is None:
                self.mailbox.put(frame)  # read at the end
                self.current.answered_inputs += 1
                self.current.last_token_s = self._last_event_s = now_s
        elif isinstance(frame, Accepted):
            reason = self._on_accepted(worker_id, frame, now_s)
        elif isinstance(frame, Dropped):
            reason = None
            self.dropped |= DROPPABLE.intersection(frame.fields)
        elif isinstance(frame, UnreadableFrame):  # skip an unknown kind: it is from a newer worker
            reason = frame.reason if frame.is_known else None
        else:
            reason = None
            self._take_final_frame(frame, now_s)
            if isinstance(frame, Finished):
                self._on_finished(frame, now_s)
            else:
                self._on_failed(worker_id, frame, now_s)
        if reason is not None:
            self._attempt_failed(ErrorCode.ENGINE_ERROR, reason, now_s)

    def _on_accepted(self, worker_id: str, frame: Accepted, now_s: float) -> str | None:
        reason = why_implausible(frame)
        if reason is not None or self.state is not State.QUEUED:
            self.log.avoid_worker(worker_id)
            return reason or "the attempt was accepted twice"
        self._enter(State.RUNNING)
        self._note_worker(worker_id, frame, now_s)
        if self.current.hosted is not None:
            self.current.hosted.release_capacity()
        self._queue_wait.spend(now_s - self.current.queued_s)
        self.ticket.accepted(worker_id)
        return None

    def _note_worker(self, worker_id: str, frame: Accepted, now_s: float) -> None:
        self.choices.generated_by(frame)
        if not self.choices.has_output:
            self.dropped = frozenset()  # the previous pool generated nothing
        self.current.worker_id = worker_id
        self.current.accepted = self.accepted = frame
        self.current.accepted_s = self.accepted_s = now_s
        self._actions.accepted(self)

    def _on_tokens(self, frame: Tokens | Deltas, now_s: float) -> None:
        self.mailbox.put_tokens(frame)
        if frame.prompt_logprobs is not None:
            return  # read together with later frames
        if self.current.first_token_s is None and (frame.token_ids or isinstance(frame, Deltas)):
            self.current.first_token_s, self.first_token_s = now_s, self.first_token_s or now_s
        self.current.last_token_s = self._last_event_s = now_s
        if self.admission.prompt.stream:  # other requests are read at the end
            self.mailbox.wake()
            if self.mailbox.held_bytes > self.mailbox.max_unread_bytes:
                self.give_up_unread(now_s)

    def _on_finished(self, frame: Finished, now_s: float) -> None:
        if frame.cancelled or not self.choices.are_complete():
            reason = "the worker ended the request before it was complete"
            self._attempt_failed(ErrorCode.ENGINE_ERROR, reason, now_s, ended_there=True)
            return
        self.prompt_tokens, self.cached_tokens = plausible_prompt(frame, self.choices, self.prompt_tokens)
        self._end("ok", None, now_s)

    def _on_failed(self, worker_id: str, frame: Failed, now_s: float) -> None:
        frame = structs.replace(
            frame, message=masked(frame.message)
        )  # upstream servers may echo the key that they refuse
        if is_premature(frame, self.queue_deadline_s, now_s):
            self.log.avoid_worker(worker_id)
        elif self.choices.is_final(frame):
            self._end("failed", client_failure(frame, self.admission, now_s), now_s)
            return
        self._attempt_failed(frame.code, frame.message, now_s, ended_there=True)

    def _take_final_frame(self, frame: Finished | Failed, now_s: float) -> None:
        current = self.current
        current.take_final_frame(frame, now_s)
        if self.state is not State.QUEUED:
            most = self.choices.max_remaining_tokens(current.max_unreceived_tokens(now_s))
            self._unreceived_tokens = max(0, min(frame.completion_tokens - self.attempt_tokens, most))

    def _on_frame_while_stopping(self, worker_id: str, frame: Frame, now_s: float) -> None:
        current = self.current
        if isinstance(frame, Accepted):  # a worker pulled the job at the last moment
            if current.worker_id is None and why_implausible(frame) is None:
                self._note_worker(worker_id, frame, now_s)
            self._stop_deadline_s = now_s + self._timeouts.cancel_s
            self._send_cancel(now_s)
        elif isinstance(frame, (Tokens, Deltas)):
            if frame.seq >= current.next_seq and self.choices.take(frame) is None:
                current.next_seq, current.last_token_s = frame.seq + 1, now_s
        elif isinstance(frame, (Vector, Dropped, UnreadableFrame)):
            current.next_seq = max(current.next_seq, frame.seq + 1)
        else:
            self._take_final_frame(frame, now_s)
            self._close(now_s)

    # --- attempts -----------------------------------------------------------------------------------------------------

    def worker_lost(self, code: ErrorCode, reason: str, now_s: float) -> None:
        """Fail the current attempt: its worker is lost."""
        if self.state is State.RUNNING:
            self._attempt_failed(code, reason, now_s)
        elif self.state is State.STOPPING:  # its exact counts will not arrive
            self._actions.record_lost_attempt(self, self.outcome, self.failure.code if self.failure else None, now_s)
            self._close(now_s)

    def job_vanished(self, attempt: int, now_s: float, why: Failure = VANISHED) -> None:
        """Fail an unaccepted attempt: its message vanished from the queue, or is useless."""
        if self.waits_for_worker(attempt):
            self._attempt_failed(why.code, why.message, now_s)

    def wait_for_own_workers(self, why: str) -> None:
        """Note why the request is not at a hosted pool although it may be."""
        self.hosted_wait = why

    def reserve_hosted_slot(self, slot: HostedSlot) -> None:
        """Assign the current attempt to a hosted pool."""
        self.current.hosted, self.hosted_wait = slot, None
        self.ticket.leave_queue()

    def move(self, attempt: int, slot: HostedSlot | None, now_s: float) -> None:
        """Move a waiting attempt to a hosted pool, or back to own workers."""
        if self.waits_for_worker(attempt):
            self._actions.withdraw(self)
            self._next_attempt(now_s, is_moved=True, hosted=slot)

    def refused(self, attempt: int, failure: Failure, now_s: float) -> None:
        """Fail the request, because the queue refused the attempt."""
        if self.waits_for_worker(attempt):
            self._end("failed", failure, now_s)

    def probe(self, now_s: float) -> None:
        """Ask the worker to resend its last frame, to check that it is alive and to find lost final frames."""
        current = self.current
        if current.worker_id is not None and self.state is State.RUNNING:
            current.probes += 1
            current.asked_s = now_s
            self._actions.request_resend(self, current.worker_id, max(0, current.next_seq - 1))

    def _attempt_failed(self, code: str, reason: str, now_s: float, *, ended_there: bool = False) -> None:
        """End the current attempt; ``ended_there``: its worker reported the failure, and publishes the record."""
        is_complete = self.choices.are_complete()  # then only the final frame was lost
        self._actions.withdraw(self)
        if self.current.worker_id is not None and not ended_there:
            self._actions.cancel(self.current.worker_id, Cancel(self.request_id, self.attempt))
            outcome, error = ("ok", None) if is_complete else ("failed", code)
            self._actions.record_lost_attempt(self, outcome, error, now_s)
        if is_complete:
            self._end("ok", None, now_s)
            return
        self.log.add(self.current, code, reason, self.attempt_tokens, is_excused=is_excused(self, code))
        if (failure := terminal_failure(self)) is not None:
            self._end("failed", failure, now_s)
        else:
            self._next_attempt(now_s)

    def _next_attempt(self, now_s: float, *, is_moved: bool = False, hosted: HostedSlot | None = None) -> None:
        last = self.current
        if self.state is State.QUEUED:
            self._queue_wait.spend(now_s - last.queued_s)
        self._actions.attempt_over(self)
        self.log.spent.add(last)
        held, self._unreceived_tokens = self.choices.held_tokens(), 0
        self.current = CurrentAttempt(self.attempt + 1, now_s, now_s, held, self.choices.is_encoded, is_moved=is_moved)
        # An attempt that only waited for a hosted pool does not overtake requests that wait for own workers.
        self.current.is_rescue = last.is_rescue or held > 0 or not (is_moved or last.hosted)
        self._enter(State.QUEUED)
        if hosted is not None:
            self.reserve_hosted_slot(hosted)
        elif self.current.is_rescue:
            self.ticket.leave_queue()  # for the resume lane
        else:
            self.ticket.enter_queue()
        self._actions.publish(self, 0.0 if is_moved else self.log.pause_s)

    # --- stopping and ending ------------------------------------------------------------------------------------------

    def cancel(self, now_s: float) -> None:
        """Stop the request, because the client disconnected."""
        self._stop("cancelled", None, now_s)

    def fail(self, failure: Failure, now_s: float) -> None:
        """Stop the request with a failure."""
        self._stop("failed", failure, now_s)

    def give_up_unread(self, now_s: float) -> None:
        """Drop the unread output, which exceeds the buffer."""
        if self.state is State.STOPPING or self.is_over:
            self.mailbox.cut()  # the outcome is known, but its writer is not done
        else:
            self.mailbox.clear()
            self._stop("failed", too_much_unread(self.admission), now_s)

    def _stop(self, outcome: str, failure: Failure | None, now_s: float) -> None:
        if self.state is State.STOPPING or self.is_over:
            return
        was_running = self.state is State.RUNNING
        self._enter(State.STOPPING)
        self.outcome, self.failure = outcome, failure
        self._actions.withdraw(self)
        if not was_running:  # not running: free its slot now so that the client can retry
            self.ticket.close()
        self._stop_deadline_s = now_s + (self._timeouts.cancel_s if was_running else WITHDRAW_LINGER_S)
        self._send_cancel(now_s)
        self._notify_client(Ended(failure))

    def _send_cancel(self, now_s: float) -> None:
        if self.current.worker_id is not None:
            self._cancel_sent_s = now_s
            self._actions.cancel(self.current.worker_id, Cancel(self.request_id, self.attempt))

    def end_at_once(self, failure: Failure, now_s: float) -> None:
        """End with a failure even if cleanup fails, because the request cannot be stopped cleanly."""
        self._enter(State.ENDED)
        self.ended_s, self.outcome, self.failure = now_s, "failed", self.failure or failure
        with contextlib.ExitStack() as stack:  # each runs even if another fails; last one first
            stack.callback(self._settle_if_over)
            stack.callback(self._actions.ended, self)
            stack.callback(self.ticket.close)
            stack.callback(self._actions.attempt_over, self)
            if self.on_end is not None:
                stack.callback(self.on_end, Ended(self.failure))
            stack.callback(self.mailbox.wake)
            stack.callback(self.mailbox.put, Ended(self.failure))

    def _end(self, outcome: str, failure: Failure | None, now_s: float) -> None:
        self.outcome, self.failure = outcome, failure
        self._notify_client(Ended(failure))
        self._close(now_s)

    def _close(self, now_s: float) -> None:
        self._enter(State.ENDED)
        self.ended_s = now_s
        self.log.spent.add(self.current)
        self._actions.attempt_over(self)
        self.ticket.close()
        self._actions.ended(self)
        self._settle_if_over()

    def _notify_client(self, end: Ended) -> None:
        self.mailbox.put(end)
        self.mailbox.wake()
        if self.on_end is not None:
            self.on_end(end)

    # --- time ---------------------------------------------------------------------------------------------------------

    def on_tick(self, now_s: float, *, connected: bool) -> None:
        """Check the time limits. ``connected``: the bus is up, so that silence is the worker's."""
        if self.state is State.STOPPING:
            self._tick_stopping(now_s)
            return
        queue_deadline_s = self.queue_deadline_s if self.state is State.QUEUED else None
        if (timeout := overdue(self._timeouts, self.admission, self.current, queue_deadline_s, now_s)) is not None:
            if may_run_elsewhere(self, timeout):
                self._attempt_failed(timeout.code, timeout.message, now_s)
            else:
                self.fail(why_waited_in_vain(self, timeout) if self.state is State.QUEUED else timeout, now_s)
            return
        if self.state is State.RUNNING and connected:
            if (reason := self.current.why_lost(now_s)) is not None:
                self._attempt_failed(ErrorCode.WORKER_LOST, reason, now_s)
            elif self.current.is_too_silent(now_s):
                self.probe(now_s)
        if not self.is_over:
            self._emit_still_waiting(now_s)

    def _tick_stopping(self, now_s: float) -> None:
        current = self.current
        if now_s >= self._stop_deadline_s:
            self._close(now_s)
        elif current.worker_id is not None and now_s - self._cancel_sent_s >= CANCEL_REPEAT_S:
            self._send_cancel(now_s)
            self._actions.request_resend(self, current.worker_id, current.next_seq)  # its final frame may be lost

    def _emit_still_waiting(self, now_s: float) -> None:
        period_s, silent_s = self._timeouts.queued_comment_s, now_s - self._last_event_s
        if period_s and self.admission.prompt.stream and silent_s >= period_s:
            self._last_event_s = now_s
            self.mailbox.put(StillWaiting(self.state.value))
            self.mailbox.wake()
