"""One admitted request: its state machine (drawn in ``states``), free of any input or output.

The fence: frames of another attempt, of another worker than the attempt's first, or with a ``seq`` seen before are
dropped. A gap in ``seq`` asks the worker to send again from there; what comes before the gap is filled is dropped, as
it will be sent again.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from msgspec import structs

from db.accounts.masking import masked
from gateway.dispatch.attempts import CurrentAttempt
from gateway.dispatch.deadlines import WITHDRAW_LINGER_S, overdue
from gateway.dispatch.failure_rules import (
    VANISHED,
    is_excused,
    is_premature,
    may_run_elsewhere,
    too_much_unread,
    verdict_of,
    why_over,
    why_waited_in_vain,
)
from gateway.dispatch.hosted_slot import HostedSlot
from gateway.dispatch.plausible import plausible_prompt, why_implausible
from gateway.dispatch.request_state import RequestState
from gateway.request.mailbox import Ended, Failure, StillWaiting
from gateway.request.request import MadeBefore, QueuePosition
from gateway.request.states import State
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
    Tokens,
    UnreadableFrame,
    Vector,
)

CANCEL_REPEAT_S: Final = 1.0
ATTEMPTS_UNKNOWN: Final = 1  # that another gateway may have begun after the last one that is known of


class OpenRequest(RequestState):
    """A request from admission to its end. Only the event loop touches it."""

    def place(self) -> QueuePosition | None:
        """Return the queue position; None once it no longer waits for its first worker."""
        return self.ticket.place()

    def rows_stored(self) -> Sequence[asyncio.Future[None]]:
        """Return futures to wait for before the client gets a good answer: then its row is sure, whatever dies."""
        self.row = self.row or self._actions.record(self)
        return (self.row,)

    def resume(self, made: MadeBefore, now_s: float) -> None:
        """Go on with what another gateway has received."""
        self.choices.revision = made.revision
        for frame in made.frames:
            if (reason := self.choices.take(frame)) is not None:
                self._end("failed", Failure(ErrorCode.INTERNAL_ERROR, reason), now_s)
                return
            self.mailbox.put_tokens(frame)
        if self.choices.are_complete():  # only the last words were lost
            self._end("ok", None, now_s)
            return
        self.current.number = made.attempt + ATTEMPTS_UNKNOWN
        self.log.add(self.current, ErrorCode.GATEWAY_LOST, "the gateway of the request is gone", 0)
        held = self.choices.held_tokens()
        self.current = CurrentAttempt(self.attempt + 1, now_s, now_s, held, self.choices.is_encoded, is_rescue=True)
        self.ticket.leave_queue()  # for the resume lane
        self._actions.publish(self, 0.0)

    # --- frames -------------------------------------------------------------------------------------------------------

    def on_frame(self, worker_id: str, frame: Frame, now_s: float) -> None:
        """Handle one frame. Called for every token: the usual case comes first."""
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
        if self.state is State.ENDED or frame.attempt != self.attempt or is_anothers:
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
                self._attempt_failed(ErrorCode.ENGINE_ERROR, "a worker answers that has not accepted", now_s)
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
        elif isinstance(frame, UnreadableFrame):  # where its kind is unknown, a newer worker sends it: do without
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
        self.state = State.RUNNING
        self._note_worker(worker_id, frame, now_s)
        if self.current.hosted is not None:
            self.current.hosted.leave_room()
        self._queue_wait.spend(now_s - self.current.queued_s)
        self.ticket.accepted(worker_id)
        return None

    def _note_worker(self, worker_id: str, frame: Accepted, now_s: float) -> None:
        self.choices.generated_by(frame)
        if not self.choices.has_output:
            self.dropped = frozenset()  # by a pool that has made nothing
        self.current.worker_id = worker_id
        self.current.accepted = self.accepted = frame
        self.current.accepted_s = self.accepted_s = now_s
        self._actions.accepted(self)

    def _on_tokens(self, frame: Tokens | Deltas, now_s: float) -> None:
        self.mailbox.put_tokens(frame)
        if frame.prompt_logprobs is not None:
            return  # read together with what comes after them
        if self.current.first_token_s is None and (frame.token_ids or isinstance(frame, Deltas)):
            self.current.first_token_s, self.first_token_s = now_s, self.first_token_s or now_s
        self.current.last_token_s = self._last_event_s = now_s
        if self.admission.stream:  # others read everything at the end
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
        frame = structs.replace(frame, message=masked(frame.message))  # upstream servers repeat the key they refuse
        if is_premature(frame, self.queue_deadline_s, now_s):
            self.log.avoid_worker(worker_id)
        elif self.choices.is_final(frame):
            self._end("failed", verdict_of(frame, self.admission, now_s), now_s)
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
        if isinstance(frame, Accepted):  # pulled at the last moment
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
        elif self.state is State.STOPPING:  # its exact counts will never come
            self._actions.record_lost_attempt(self, self.outcome, self.failure.code if self.failure else None, now_s)
            self._close(now_s)

    def job_vanished(self, attempt: int, now_s: float, why: Failure = VANISHED) -> None:
        """Fail an unaccepted attempt: its message is gone from the queue, or of no use."""
        if self.waits_for_worker(attempt):
            self._attempt_failed(why.code, why.message, now_s)

    def reserve_hosted_slot(self, place: HostedSlot) -> None:
        """Queue the current attempt for a hosted pool."""
        self.current.hosted, self.hosted_wait = place, None
        self.ticket.leave_queue()

    def move(self, attempt: int, place: HostedSlot | None, now_s: float) -> None:
        """Move a waiting attempt to a hosted pool, or back from it."""
        if self.waits_for_worker(attempt):
            self._actions.withdraw(self)
            self._next_attempt(now_s, is_moved=True, hosted=place)

    def refused(self, attempt: int, failure: Failure, now_s: float) -> None:
        """Fail the request: the queue refuses the attempt."""
        if self.waits_for_worker(attempt):
            self._end("failed", failure, now_s)

    def probe(self, now_s: float) -> None:
        """Ask the worker for its last frame again: a sign of life, and the way to find frames lost at the end."""
        current = self.current
        if current.worker_id is not None and self.state is State.RUNNING:
            current.probes += 1
            current.asked_s = now_s
            self._actions.request_resend(self, current.worker_id, max(0, current.next_seq - 1))

    def _attempt_failed(self, code: str, reason: str, now_s: float, *, ended_there: bool = False) -> None:
        """End the current attempt; ``ended_there``: its worker reported that, and publishes its own record."""
        is_complete = self.choices.are_complete()  # then only the last words were lost
        self._actions.withdraw(self)
        if self.current.worker_id is not None and not ended_there:
            self._actions.cancel(self.current.worker_id, Cancel(self.request_id, self.attempt))
            outcome, error = ("ok", None) if is_complete else ("failed", code)
            self._actions.record_lost_attempt(self, outcome, error, now_s)
        if is_complete:
            self._end("ok", None, now_s)
            return
        self.log.add(self.current, code, reason, self.attempt_tokens, is_excused=is_excused(self, code))
        if (over := why_over(self)) is not None:
            self._end("failed", over, now_s)
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
        # Whoever has only been at a hosted pool, in vain, has not come before those that wait for our own workers.
        self.current.is_rescue = last.is_rescue or held > 0 or not (is_moved or last.hosted)
        self.state = State.QUEUED
        if hosted is not None:
            self.reserve_hosted_slot(hosted)
        elif self.current.is_rescue:
            self.ticket.leave_queue()  # for the resume lane
        else:
            self.ticket.enter_queue()
        self._actions.publish(self, 0.0 if is_moved else self.log.pause_s)

    # --- stopping and ending ------------------------------------------------------------------------------------------

    def cancel(self, now_s: float) -> None:
        """Stop: the client has disconnected."""
        self._stop("cancelled", None, now_s)

    def fail(self, failure: Failure, now_s: float) -> None:
        """Stop with a failure of the gateway's."""
        self._stop("failed", failure, now_s)

    def give_up_unread(self, now_s: float) -> None:
        """Drop what the client has not read: it exceeds the buffer."""
        if self.state in {State.STOPPING, State.ENDED}:
            self.mailbox.cut()  # the verdict is known, and its writer still at it
        else:
            self.mailbox.clear()
            self._stop("failed", too_much_unread(self.admission), now_s)

    def _stop(self, outcome: str, failure: Failure | None, now_s: float) -> None:
        if self.state in {State.STOPPING, State.ENDED}:
            return
        was_running = self.state is State.RUNNING
        self.state = State.STOPPING
        self.outcome, self.failure = outcome, failure
        self._actions.withdraw(self)
        if not was_running:  # it takes up nothing any more: whoever leaves may come back at once
            self.ticket.close()
        self._stop_deadline_s = now_s + (self._timeouts.cancel_s if was_running else WITHDRAW_LINGER_S)
        self._send_cancel(now_s)
        self._notify_client(Ended(failure))

    def _send_cancel(self, now_s: float) -> None:
        if self.current.worker_id is not None:
            self._cancel_sent_s = now_s
            self._actions.cancel(self.current.worker_id, Cancel(self.request_id, self.attempt))

    def give_up_waiting(self, now_s: float) -> None:
        """Stop waiting for exact counts: the process ends."""
        self.closed = True
        if self.state is State.STOPPING:
            self._close(now_s)

    def _end(self, outcome: str, failure: Failure | None, now_s: float) -> None:
        self.outcome, self.failure = outcome, failure
        self._notify_client(Ended(failure))
        self._close(now_s)

    def _close(self, now_s: float) -> None:
        self.state = State.ENDED
        self.ended_s = now_s
        self.log.spent.add(self.current)
        self._actions.attempt_over(self)
        self.ticket.close()
        self._actions.ended(self)

    def _notify_client(self, end: Ended) -> None:
        self.mailbox.put(end)
        self.mailbox.wake()
        if self.on_end is not None:
            self.on_end(end)

    # --- time ---------------------------------------------------------------------------------------------------------

    def on_tick(self, now_s: float, *, connected: bool) -> None:
        """Check the time limits. ``connected``: whether silence can be the worker's fault, not the queue server's."""
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
        self._emit_still_waiting(now_s)

    def _tick_stopping(self, now_s: float) -> None:
        current = self.current
        if now_s >= self._stop_deadline_s:
            self._close(now_s)
        elif current.worker_id is not None and now_s - self._cancel_sent_s >= CANCEL_REPEAT_S:
            self._send_cancel(now_s)
            self._actions.request_resend(self, current.worker_id, current.next_seq)  # its last frame may have been lost

    def _emit_still_waiting(self, now_s: float) -> None:
        period_s, silent_s = self._timeouts.queued_comment_s, now_s - self._last_event_s
        if period_s and self.admission.stream and silent_s >= period_s:
            self._last_event_s = now_s
            self.mailbox.put(StillWaiting(self.state.value))
            self.mailbox.wake()
