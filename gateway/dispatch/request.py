"""One admitted request: its state machine, free of any input or output.

                     publish                  Accepted                       Finished
    (admitted) ────────────────> QUEUED ──────────────────> RUNNING ─────────────────────────> ENDED ok
                                  ^   │                      │    │
                                  │   │  Failed(retryable),  │    │
                                  └───┴─ worker silent/lost ─┘    │
                                  attempt + 1, resuming           │
                                      │                           │
               refused, failed for good, attempts exhausted ──────┴─────────────────────────> ENDED failed
                                      │                           │
                  caller left, or one of the timeouts             │
                                      v                           v
                                  STOPPING: the caller has his verdict; the worker's exact ─> ENDED cancelled
                                  token counts are waited for, but not for long                or failed

The fence: frames of another attempt, of another worker than the attempt's first, or with a ``seq`` seen before are
dropped. A gap in ``seq`` asks the worker to send again from there; what comes before the gap is filled is dropped, as
it will be sent again.
"""

from collections.abc import Callable
from enum import Enum
from typing import Final

from gateway.admission.ticket import Ticket
from gateway.dispatch.actions import Actions
from gateway.dispatch.choices import Choices
from gateway.dispatch.mailbox import MAX_UNREAD_EVENTS, Ended, Failure, Mailbox, StillWaiting
from gateway.settings import TimeoutSettings
from protocol.errors import ErrorCode
from protocol.messages import (
    Accepted,
    Cancel,
    Failed,
    Finished,
    Frame,
    Tokens,
)

SILENCE_LIMIT_S: Final = 2.0  # an accepted request without a frame for longer is asked after
PROBE_PERIOD_S: Final = 1.0
MAX_PROBES: Final = 3
RESEND_GAP_S: Final = 0.25  # between two requests to send the same frames again
GAP_LIMIT_S: Final = 5.0  # a gap open for longer is a failed attempt
CANCEL_LIMIT_S: Final = 5.0  # how long the exact counts of a stopped attempt are waited for
CANCEL_REPEAT_S: Final = 1.0
WITHDRAW_LINGER_S: Final = 2.0  # how long a worker that pulled the job at the last moment may still say so
ACCEPT_LIMIT_S: Final = 1.0  # within which a worker takes a request that is not to be queued
RESCUE_PATIENCE_S: Final = 5.0  # for an attempt after the first, even if the first has used all patience up
CLOCK_SKEW_S: Final = 1.0  # between a gateway and a worker

PROMPT_PARAMS: Final = {"chat.completions": "messages", "completions": "prompt"}


class State(Enum):
    """Where a request stands; drawn above."""

    QUEUED = "queued"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class OpenRequest:
    """The request from admission to its end. Only the event loop touches it."""

    def __init__(
        self, ticket: Ticket, timeouts: TimeoutSettings, max_attempts: int, actions: Actions, now_s: float
    ) -> None:
        self.admission = ticket.admission
        self.ticket = ticket
        self.mailbox = Mailbox()
        self.state = State.QUEUED
        self.attempt = 1
        self.worker_id: str | None = None  # of the current attempt, once accepted
        self.accepted: Accepted | None = None  # of the last attempt that was accepted
        self.published_s: float | None = None  # when the first attempt was first handed to the queue server
        self.stream_sequence: int | None = None  # of the current attempt's message
        self.choices = Choices(ticket.admission.sampling.n)
        self.cached_tokens = 0
        self.accepted_s: float | None = None
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        self.outcome = "ok"  # "ok" | "cancelled" | "failed"; final once ENDED
        self.failure: Failure | None = None
        self.http_status: int | None = None  # as sent; set by the HTTP side
        self.closed = False  # the HTTP side has let go
        self.on_end: Callable[[Ended], None] | None = None  # called when the caller's verdict is known
        self._timeouts = timeouts
        self._max_attempts = max_attempts
        self._actions = actions
        self._next_seq = 0
        self._tokens_before_attempt = 0
        self._attempt_tokens: int | None = None  # as the worker reports them, once it has
        self._queued_s = now_s
        self._patience_s = ticket.admission.queue_wait_s  # for the queue, what earlier attempts have waited taken off
        self._heard_s = now_s
        self._last_token_s: float | None = None  # of the current attempt
        self._last_event_s = now_s
        self._probes = 0
        self._asked_s = float("-inf")
        self._gap_since_s: float | None = None
        self._stop_deadline_s = float("inf")
        self._cancel_sent_s = float("-inf")

    # --- what others may ask ------------------------------------------------------------------------------------------

    @property
    def request_id(self) -> str:
        """Its id."""
        return self.admission.request_id

    @property
    def queue_deadline_s(self) -> float:
        """Until when the current attempt may wait for a worker (monotonic clock)."""
        total_s = self.admission.received_s + self._timeouts.total_s
        return min(self._queued_s + self._patience_s, total_s, self.admission.deadline_s)

    @property
    def completion_tokens(self) -> int:
        """Output tokens over all choices and attempts; exact once ENDED."""
        held = self.choices.held_tokens()
        if self._attempt_tokens is None or self.outcome == "ok":
            return held
        return max(held, self._tokens_before_attempt + self._attempt_tokens)

    def waits_for_worker(self, attempt: int) -> bool:
        """Whether this attempt is the current one and not yet accepted."""
        return self.state is State.QUEUED and self.attempt == attempt

    # --- frames -------------------------------------------------------------------------------------------------------

    def on_frame(self, worker_id: str, frame: Frame, now_s: float) -> None:
        """Take one frame. Called for every token: the usual case comes first."""
        if (
            frame.seq == self._next_seq
            and frame.attempt == self.attempt
            and worker_id == self.worker_id
            and self.state is State.RUNNING
        ):
            self._heard_s = now_s
            self._take(worker_id, frame, now_s)
            return
        self._on_unusual_frame(worker_id, frame, now_s)

    def _on_unusual_frame(self, worker_id: str, frame: Frame, now_s: float) -> None:
        if self._is_fenced_out(worker_id, frame):
            if isinstance(frame, Accepted):
                self._actions.cancel(worker_id, Cancel(frame.request_id, frame.attempt))
            return
        self._heard_s = now_s
        self._probes = 0
        if self.state is State.STOPPING:
            self._on_frame_while_stopping(worker_id, frame, now_s)
        elif isinstance(frame, Failed) and frame.code == ErrorCode.UNKNOWN_ATTEMPT:
            self._attempt_failed(ErrorCode.WORKER_LOST, "the worker no longer knows the request", now_s)
        elif frame.seq == self._next_seq:
            self._take(worker_id, frame, now_s)
        elif frame.seq > self._next_seq:
            self._on_gap(worker_id, now_s)

    def _is_fenced_out(self, worker_id: str, frame: Frame) -> bool:
        return (
            self.state is State.ENDED
            or frame.attempt != self.attempt
            or (self.worker_id is not None and worker_id != self.worker_id)
        )

    def _take(self, worker_id: str, frame: Frame, now_s: float) -> None:
        self._next_seq += 1
        self._gap_since_s = None
        if isinstance(frame, Tokens):
            self._on_tokens(frame, now_s)
        elif isinstance(frame, Accepted):
            self._on_accepted(worker_id, frame, now_s)
        elif isinstance(frame, Finished):
            self._on_finished(frame, now_s)
        else:
            self._on_failed(frame, now_s)

    def _on_accepted(self, worker_id: str, frame: Accepted, now_s: float) -> None:
        self.state = State.RUNNING
        self.worker_id = worker_id
        self.accepted = frame
        self.accepted_s = now_s
        # Little patience left is no reason to give up at once, should this attempt fail in mid-stream.
        least_s = min(RESCUE_PATIENCE_S, self._patience_s)
        self._patience_s = max(least_s, self._patience_s - (now_s - self._queued_s))
        self.ticket.accepted(worker_id)

    def _on_tokens(self, frame: Tokens, now_s: float) -> None:
        if frame.index >= len(self.choices):
            self._attempt_failed(
                ErrorCode.ENGINE_ERROR, f"the worker sent choice {frame.index}, never asked for", now_s
            )
            return
        if self.first_token_s is None:
            self.first_token_s = now_s
        self._last_token_s = self._last_event_s = now_s
        self.choices.add(frame)
        self.mailbox.put(frame)
        if self.admission.stream:  # others read everything at the end
            self.mailbox.wake()
            if len(self.mailbox) > MAX_UNREAD_EVENTS:
                self._give_up_slow_client(now_s)

    def _on_finished(self, frame: Finished, now_s: float) -> None:
        if frame.cancelled or not self.choices.are_complete():
            self._attempt_failed(ErrorCode.ENGINE_ERROR, "the worker ended the request before it was complete", now_s)
            return
        self.cached_tokens = frame.cached_tokens
        self._end("ok", None, now_s)

    def _on_failed(self, frame: Failed, now_s: float) -> None:
        if frame.retryable:
            self._attempt_failed(frame.code, frame.message, now_s)
            return
        self._attempt_tokens = frame.completion_tokens
        code = _known_code(frame.code)
        if code is ErrorCode.DEADLINE_EXCEEDED and now_s < self.admission.deadline_s - CLOCK_SKEW_S:
            code = ErrorCode.QUEUE_WAIT_TIMEOUT  # the worker was told only until when it may wait
        # The engine knows token ids only; the caller knows the field that they were made from.
        param = PROMPT_PARAMS[self.admission.endpoint] if frame.param == "prompt_ids" else frame.param
        self._end("failed", Failure(code, frame.message, param), now_s)

    def _on_gap(self, worker_id: str, now_s: float) -> None:
        if self._gap_since_s is None:
            self._gap_since_s = now_s
        if now_s - self._asked_s >= RESEND_GAP_S:
            self._asked_s = now_s
            self._actions.ask_again(self, worker_id, self._next_seq)

    def _on_frame_while_stopping(self, worker_id: str, frame: Frame, now_s: float) -> None:
        if isinstance(frame, Accepted):  # pulled at the last moment
            if self.worker_id is None:
                self.worker_id, self.accepted, self.accepted_s = worker_id, frame, now_s
            self._stop_deadline_s = now_s + CANCEL_LIMIT_S
            self._send_cancel(now_s)
        elif isinstance(frame, Tokens):
            if frame.seq >= self._next_seq and frame.index < len(self.choices):
                self._next_seq = frame.seq + 1
                self.choices.add(frame)
        else:
            self._attempt_tokens = frame.completion_tokens
            self._finish_stopping(now_s)

    # --- attempts -----------------------------------------------------------------------------------------------------

    def job_vanished(self, attempt: int, now_s: float) -> None:
        """The attempt's message is gone from the queue although nobody has accepted it."""
        if self.waits_for_worker(attempt):
            self._attempt_failed(ErrorCode.WORKER_LOST, "the job vanished from the queue", now_s)

    def refused(self, attempt: int, failure: Failure, now_s: float) -> None:
        """The queue does not take the attempt."""
        if self.waits_for_worker(attempt):
            self._end("failed", failure, now_s)

    def probe(self, now_s: float) -> None:
        """Ask the worker for its last frame again: a sign of life, and the way to find frames lost at the end."""
        if self.worker_id is not None and self.state is State.RUNNING:
            self._probes += 1
            self._asked_s = now_s
            self._actions.ask_again(self, self.worker_id, max(0, self._next_seq - 1))

    def _attempt_failed(self, code: str, reason: str, now_s: float) -> None:
        self._actions.withdraw(self)
        if self.worker_id is not None:
            self._actions.cancel(self.worker_id, Cancel(self.request_id, self.attempt))
        if self.choices.are_complete():  # only the last words were lost
            self._end("ok", None, now_s)
        elif self.attempt >= self._max_attempts:
            message = f"{self.attempt} attempts failed; the last: {reason} ({code})"
            self._end("failed", Failure(ErrorCode.ATTEMPTS_EXHAUSTED, message), now_s)
        else:
            self._next_attempt(now_s)

    def _next_attempt(self, now_s: float) -> None:
        self.attempt += 1
        self.state = State.QUEUED
        self.worker_id = None
        self.stream_sequence = None
        self._next_seq = 0
        self._tokens_before_attempt = self.choices.held_tokens()
        self._attempt_tokens = None
        self._queued_s = self._heard_s = now_s
        self._last_token_s = None
        self._probes = 0
        self._gap_since_s = None
        self._actions.publish(self)

    # --- stopping and ending ------------------------------------------------------------------------------------------

    def cancel(self, now_s: float) -> None:
        """The caller has left."""
        self._stop("cancelled", None, now_s)

    def fail(self, failure: Failure, now_s: float) -> None:
        """Give the request up for a reason of the gateway's."""
        self._stop("failed", failure, now_s)

    def _give_up_slow_client(self, now_s: float) -> None:
        self.mailbox.clear()
        failure = Failure(ErrorCode.SLOW_CLIENT, "the client reads more slowly than the buffer allows")
        self._stop("failed", failure, now_s)

    def _stop(self, outcome: str, failure: Failure | None, now_s: float) -> None:
        if self.state in {State.STOPPING, State.ENDED}:
            return
        was_running = self.state is State.RUNNING
        self.state = State.STOPPING
        self.outcome, self.failure = outcome, failure
        self._actions.withdraw(self)
        self.ticket.leave_queue()
        self._stop_deadline_s = now_s + (CANCEL_LIMIT_S if was_running else WITHDRAW_LINGER_S)
        self._send_cancel(now_s)
        self._tell_caller(Ended(failure))

    def _send_cancel(self, now_s: float) -> None:
        if self.worker_id is not None:
            self._cancel_sent_s = now_s
            self._actions.cancel(self.worker_id, Cancel(self.request_id, self.attempt))

    def give_up_waiting(self, now_s: float) -> None:
        """The process ends: stop waiting for exact counts."""
        self.closed = True
        if self.state is State.STOPPING:
            self._finish_stopping(now_s)

    def _finish_stopping(self, now_s: float) -> None:
        self.state = State.ENDED
        self.ended_s = now_s
        self.ticket.close()
        self._actions.ended(self)

    def _end(self, outcome: str, failure: Failure | None, now_s: float) -> None:
        self.state = State.ENDED
        self.outcome, self.failure, self.ended_s = outcome, failure, now_s
        self.ticket.close()
        self._tell_caller(Ended(failure))
        self._actions.ended(self)

    def _tell_caller(self, end: Ended) -> None:
        self.mailbox.put(end)
        self.mailbox.wake()
        if self.on_end is not None:
            self.on_end(end)

    # --- time ---------------------------------------------------------------------------------------------------------

    def on_tick(self, now_s: float, worker_alive: Callable[[str, float], bool], *, connected: bool) -> None:
        """Look at the clock. ``connected``: whether silence can be the worker's fault, not the queue server's."""
        if self.state is State.STOPPING:
            self._tick_stopping(now_s)
            return
        timeout = self._timeout(now_s)
        if timeout is not None:
            self.fail(timeout, now_s)
            return
        if self.state is State.RUNNING and connected:
            self._tick_running(now_s, worker_alive)
        self._say_still_waiting(now_s)

    def _tick_stopping(self, now_s: float) -> None:
        if now_s >= self._stop_deadline_s:
            self._finish_stopping(now_s)
        elif self.worker_id is not None and now_s - self._cancel_sent_s >= CANCEL_REPEAT_S:
            self._send_cancel(now_s)
            self._actions.ask_again(self, self.worker_id, self._next_seq)  # its last frame may have been lost

    def _timeout(self, now_s: float) -> Failure | None:
        limits = self._timeouts
        if now_s >= self.admission.deadline_s:
            return Failure(ErrorCode.DEADLINE_EXCEEDED, "the deadline that the caller has set has passed")
        if now_s - self.admission.received_s >= limits.total_s:
            return Failure(ErrorCode.TOTAL_TIMEOUT, f"the request took longer than {limits.total_s:g} s")
        if self.state is State.QUEUED:
            return self._queue_timeout(now_s)
        if self._last_token_s is None:
            if self.accepted_s is not None and now_s - self.accepted_s >= limits.first_token_s:
                return Failure(ErrorCode.FIRST_TOKEN_TIMEOUT, f"no first token within {limits.first_token_s:g} s")
        elif now_s - self._last_token_s >= limits.inter_token_s:
            return Failure(ErrorCode.INTER_TOKEN_TIMEOUT, f"no further token within {limits.inter_token_s:g} s")
        return None

    def _queue_timeout(self, now_s: float) -> Failure | None:
        waited_s = now_s - self._queued_s
        if now_s >= self.queue_deadline_s:
            return Failure(ErrorCode.QUEUE_WAIT_TIMEOUT, f"no worker took the request within {waited_s:.1f} s")
        if self.admission.do_not_queue and self.attempt == 1 and waited_s >= ACCEPT_LIMIT_S:
            return Failure(ErrorCode.NO_FREE_PLACE, "no worker took the request at once", retry_after_s=1)
        return None

    def _tick_running(self, now_s: float, worker_alive: Callable[[str, float], bool]) -> None:
        if self.worker_id is not None and not worker_alive(self.worker_id, now_s):
            self._attempt_failed(ErrorCode.WORKER_LOST, f"worker {self.worker_id} is lost", now_s)
        elif self._gap_since_s is not None and now_s - self._gap_since_s >= GAP_LIMIT_S:
            self._attempt_failed(ErrorCode.WORKER_LOST, "lost frames were not sent again", now_s)
        elif now_s - self._heard_s >= SILENCE_LIMIT_S and now_s - self._asked_s >= PROBE_PERIOD_S:
            if self._probes >= MAX_PROBES:
                self._attempt_failed(ErrorCode.WORKER_LOST, f"worker {self.worker_id} does not answer", now_s)
            else:
                self.probe(now_s)

    def _say_still_waiting(self, now_s: float) -> None:
        period_s = self._timeouts.queued_comment_s
        if period_s and self.admission.stream and now_s - self._last_event_s >= period_s:
            self._last_event_s = now_s
            self.mailbox.put(StillWaiting(self.state.value))
            self.mailbox.wake()


def _known_code(code: str) -> ErrorCode:
    try:
        return ErrorCode(code)
    except ValueError:  # of a newer worker
        return ErrorCode.INTERNAL_ERROR
