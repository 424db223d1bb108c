"""One admitted request: its state machine (drawn in ``states``), free of any input or output.

The fence: frames of another attempt, of another worker than the attempt's first, or with a ``seq`` seen before are
dropped. A gap in ``seq`` asks the worker to send again from there; what comes before the gap is filled is dropped, as
it will be sent again.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from gateway.admission.ticket import Ticket
from gateway.dispatch.actions import Actions
from gateway.dispatch.attempts import AttemptLog, CurrentAttempt
from gateway.dispatch.chat_choices import choices_of
from gateway.dispatch.deadlines import WITHDRAW_LINGER_S, QueueWaitBudget, overdue
from gateway.dispatch.failure_rules import VANISHED, is_premature, too_much_unread, verdict_of, why_over
from gateway.dispatch.plausible import plausible_prompt, why_implausible
from gateway.hosted.slot import HostedSlot
from gateway.request.mailbox import Ended, Failure, Mailbox, StillWaiting
from gateway.request.queue_position import QueuePosition
from gateway.request.states import State
from gateway.settings import TimeoutSettings
from protocol.chat import Deltas
from protocol.errors import ErrorCode
from protocol.messages import Accepted, Cancel, Failed, Finished, Frame, Tokens, UnreadableFrame, Vector
from protocol.usage import RequestRecord

CANCEL_LIMIT_S: Final = 5.0  # how long the exact counts of a stopped attempt are waited for
CANCEL_REPEAT_S: Final = 1.0


class OpenRequest:
    """The request from admission to its end. Only the event loop touches it."""

    def __init__(
        self,
        ticket: Ticket,
        timeouts: TimeoutSettings,
        max_attempts: int,
        actions: Actions,
        now_s: float,
        *,
        mailbox: Mailbox | None = None,
    ) -> None:
        """``mailbox``: where its events go; default: one of its own."""
        self.admission = admission = ticket.admission
        self.request_id, self.prompt_tokens = admission.request_id, admission.prompt_tokens
        self.ticket = ticket
        self.mailbox = Mailbox() if mailbox is None else mailbox
        self.state = State.QUEUED
        self.current = CurrentAttempt(1, queued_s=now_s, heard_s=now_s)
        self.log = AttemptLog(max_attempts)
        self.accepted: Accepted | None = None  # of the last attempt that was accepted
        self.published_s: float | None = None  # when the first attempt was first handed to the queue server
        self.choices = choices_of(admission)
        self._unheard_tokens = 0  # of a stopped or failed attempt, as its worker says, and as it can have made
        self.cached_tokens = 0
        self.accepted_s: float | None = None
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        self.outcome = "ok"  # "ok" | "cancelled" | "failed"; final once ENDED
        self.failure: Failure | None = None
        self.row: asyncio.Future[None] | None = None  # done: the request will have a row; None: not seen to yet
        self.record: RequestRecord | None = None  # once it is left for the ledger
        self.http_status: int | None = None  # as sent, if it was; set by the HTTP side
        self.hosted_wait: str | None = None  # why it is at no hosted pool, though it may: gateway.hosted.pools
        self.closed = False  # the HTTP side has let go
        self.on_end: Callable[[Ended], None] | None = None  # called when the caller's verdict is known
        self._timeouts = timeouts
        self._actions = actions
        self._queue_wait = QueueWaitBudget(admission.queue_wait_s)
        self._last_event_s = now_s
        self._stop_deadline_s = float("inf")
        self._cancel_sent_s = float("-inf")

    # --- what others may ask ------------------------------------------------------------------------------------------

    @property
    def attempt(self) -> int:
        """The number of the current attempt, from 1."""
        return self.current.number

    @property
    def worker_id(self) -> str | None:
        """Who has the current attempt; None while it is queued."""
        return self.current.worker_id

    @property
    def queue_deadline_s(self) -> float:
        """Until when the current attempt may wait for a worker (monotonic clock)."""
        total_s = self.admission.received_s + self._timeouts.total_s
        return min(self.current.queued_s + self._queue_wait.left_s, total_s, self.admission.deadline_s)

    @property
    def completion_tokens(self) -> int:
        """Output tokens over all choices and attempts; exact once ENDED."""
        return self.choices.held_tokens() + self._unheard_tokens

    @property
    def attempt_tokens(self) -> int:
        """Output tokens of the current attempt, as far as they have come."""
        return self.choices.held_tokens() - self.current.tokens_before

    def place(self) -> QueuePosition | None:
        """Where it stands now; None once it no longer waits for its first worker."""
        return self.ticket.place()

    def rows_seen_to(self) -> Sequence[asyncio.Future[None]]:
        """What must be done before the caller is told anything good: then it will have a row, whatever dies."""
        self.row = self.row or self._actions.record(self)
        return (self.row,)

    def waits_for_worker(self, attempt: int) -> bool:
        """Whether this attempt is the current one and not yet accepted."""
        return self.state is State.QUEUED and self.current.number == attempt

    # --- frames -------------------------------------------------------------------------------------------------------

    def on_frame(self, worker_id: str, frame: Frame, now_s: float) -> None:
        """Take one frame. Called for every token: the usual case comes first."""
        current = self.current
        if (
            frame.seq == current.next_seq
            and frame.attempt == current.number
            and worker_id == current.worker_id
            and self.state is State.RUNNING
        ):
            current.heard_s = now_s
            self._take(worker_id, frame, now_s)
            return
        self._on_unusual_frame(worker_id, frame, now_s)

    def _on_unusual_frame(self, worker_id: str, frame: Frame, now_s: float) -> None:
        is_anothers = self.worker_id is not None and worker_id != self.worker_id
        if self.state is State.ENDED or frame.attempt != self.attempt or is_anothers:
            self._actions.fenced_out(worker_id, frame, now_s)
            return
        self.current.heard_s = now_s
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
        elif frame.seq > self.current.next_seq and self.current.should_ask_again(now_s):
            self._actions.ask_again(self, worker_id, self.current.next_seq)

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
        elif isinstance(frame, UnreadableFrame):  # where its kind is unknown, a newer worker sends it: do without
            reason = frame.reason if frame.is_known else None
        else:
            reason = None
            self._take_last_word(frame, now_s)
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
        self.choices.made_by(frame)
        self.current.worker_id = worker_id
        self.current.accepted = self.accepted = frame
        self.current.accepted_s = self.accepted_s = now_s
        self._actions.taken(self)

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
        if is_premature(frame, self.queue_deadline_s, now_s):
            self.log.avoid_worker(worker_id)
        elif self.choices.is_final(frame):
            self._end("failed", verdict_of(frame, self.admission, now_s), now_s)
            return
        self._attempt_failed(frame.code, frame.message, now_s, ended_there=True)

    def _take_last_word(self, frame: Finished | Failed, now_s: float) -> None:
        current = self.current
        current.take_last_word(frame, now_s)
        if self.state is not State.QUEUED:
            most = self.choices.most_to_come(current.most_unheard(now_s))
            self._unheard_tokens = max(0, min(frame.completion_tokens - self.attempt_tokens, most))

    def _on_frame_while_stopping(self, worker_id: str, frame: Frame, now_s: float) -> None:
        current = self.current
        if isinstance(frame, Accepted):  # pulled at the last moment
            if current.worker_id is None and why_implausible(frame) is None:
                self._note_worker(worker_id, frame, now_s)
            self._stop_deadline_s = now_s + CANCEL_LIMIT_S
            self._send_cancel(now_s)
        elif isinstance(frame, (Tokens, Deltas)):
            if frame.seq >= current.next_seq and self.choices.take(frame) is None:
                current.next_seq, current.last_token_s = frame.seq + 1, now_s
        elif isinstance(frame, (Vector, UnreadableFrame)):
            current.next_seq = max(current.next_seq, frame.seq + 1)
        else:
            self._take_last_word(frame, now_s)
            self._close(now_s)

    # --- attempts -----------------------------------------------------------------------------------------------------

    def worker_lost(self, code: ErrorCode, reason: str, now_s: float) -> None:
        """The worker that has the current attempt is gone."""
        if self.state is State.RUNNING:
            self._attempt_failed(code, reason, now_s)
        elif self.state is State.STOPPING:  # its exact counts will never come
            self._actions.record_lost_attempt(self, self.outcome, self.failure.code if self.failure else None, now_s)
            self._close(now_s)

    def job_vanished(self, attempt: int, now_s: float, why: Failure = VANISHED) -> None:
        """The attempt's message is gone from the queue, or of no use, although nobody has accepted it."""
        if self.waits_for_worker(attempt):
            self._attempt_failed(why.code, why.message, now_s)

    def reserve_hosted_slot(self, place: HostedSlot) -> None:
        """The current attempt is to be queued for a hosted pool."""
        self.current.hosted, self.hosted_wait = place, None
        self.ticket.leave_queue()

    def move(self, attempt: int, place: HostedSlot | None, now_s: float) -> None:
        """Wait elsewhere: at a hosted pool, or no longer there."""
        if self.waits_for_worker(attempt):
            self._actions.withdraw(self)
            self._next_attempt(now_s, is_moved=True, hosted=place)

    def refused(self, attempt: int, failure: Failure, now_s: float) -> None:
        """The queue does not take the attempt."""
        if self.waits_for_worker(attempt):
            self._end("failed", failure, now_s)

    def probe(self, now_s: float) -> None:
        """Ask the worker for its last frame again: a sign of life, and the way to find frames lost at the end."""
        current = self.current
        if current.worker_id is not None and self.state is State.RUNNING:
            current.probes += 1
            current.asked_s = now_s
            self._actions.ask_again(self, current.worker_id, max(0, current.next_seq - 1))

    def _attempt_failed(self, code: str, reason: str, now_s: float, *, ended_there: bool = False) -> None:
        """The current attempt is over; ``ended_there``: its worker has said so, and leaves its own record."""
        is_complete = self.choices.are_complete()  # then only the last words were lost
        self._actions.withdraw(self)
        if self.current.worker_id is not None and not ended_there:
            self._actions.cancel(self.current.worker_id, Cancel(self.request_id, self.attempt))
            outcome, error = ("ok", None) if is_complete else ("failed", code)
            self._actions.record_lost_attempt(self, outcome, error, now_s)
        if is_complete:
            self._end("ok", None, now_s)
            return
        self.log.add(self.current, code, reason, self.attempt_tokens)
        if (over := why_over(self)) is not None:
            self._end("failed", over, now_s)
        else:
            self._next_attempt(now_s)

    def _next_attempt(self, now_s: float, *, is_moved: bool = False, hosted: HostedSlot | None = None) -> None:
        last = self.current
        if self.state is State.QUEUED:
            self._queue_wait.spend(now_s - last.queued_s)
        self._actions.left(self)
        self.log.spent.add(last)
        held, self._unheard_tokens = self.choices.held_tokens(), 0
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
        """The caller has left."""
        self._stop("cancelled", None, now_s)

    def fail(self, failure: Failure, now_s: float) -> None:
        """Give the request up for a reason of the gateway's."""
        self._stop("failed", failure, now_s)

    def give_up_unread(self, now_s: float) -> None:
        """Throw away what its caller has not read: it is more than may be kept."""
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
        self._stop_deadline_s = now_s + (CANCEL_LIMIT_S if was_running else WITHDRAW_LINGER_S)
        self._send_cancel(now_s)
        self._tell_caller(Ended(failure))

    def _send_cancel(self, now_s: float) -> None:
        if self.current.worker_id is not None:
            self._cancel_sent_s = now_s
            self._actions.cancel(self.current.worker_id, Cancel(self.request_id, self.attempt))

    def give_up_waiting(self, now_s: float) -> None:
        """The process ends: stop waiting for exact counts."""
        self.closed = True
        if self.state is State.STOPPING:
            self._close(now_s)

    def _end(self, outcome: str, failure: Failure | None, now_s: float) -> None:
        self.outcome, self.failure = outcome, failure
        self._tell_caller(Ended(failure))
        self._close(now_s)

    def _close(self, now_s: float) -> None:
        self.state = State.ENDED
        self.ended_s = now_s
        self.log.spent.add(self.current)
        self._actions.left(self)
        self.ticket.close()
        self._actions.ended(self)

    def _tell_caller(self, end: Ended) -> None:
        self.mailbox.put(end)
        self.mailbox.wake()
        if self.on_end is not None:
            self.on_end(end)

    # --- time ---------------------------------------------------------------------------------------------------------

    def on_tick(self, now_s: float, *, connected: bool) -> None:
        """Look at the clock. ``connected``: whether silence can be the worker's fault, not the queue server's."""
        if self.state is State.STOPPING:
            self._tick_stopping(now_s)
            return
        queue_deadline_s = self.queue_deadline_s if self.state is State.QUEUED else None
        if (timeout := overdue(self._timeouts, self.admission, self.current, queue_deadline_s, now_s)) is not None:
            self.fail(timeout, now_s)
            return
        if self.state is State.RUNNING and connected:
            if (reason := self.current.why_lost(now_s)) is not None:
                self._attempt_failed(ErrorCode.WORKER_LOST, reason, now_s)
            elif self.current.is_too_silent(now_s):
                self.probe(now_s)
        self._say_still_waiting(now_s)

    def _tick_stopping(self, now_s: float) -> None:
        current = self.current
        if now_s >= self._stop_deadline_s:
            self._close(now_s)
        elif current.worker_id is not None and now_s - self._cancel_sent_s >= CANCEL_REPEAT_S:
            self._send_cancel(now_s)
            self._actions.ask_again(self, current.worker_id, current.next_seq)  # its last frame may have been lost

    def _say_still_waiting(self, now_s: float) -> None:
        period_s, silent_s = self._timeouts.queued_comment_s, now_s - self._last_event_s
        if period_s and self.admission.stream and silent_s >= period_s:
            self._last_event_s = now_s
            self.mailbox.put(StillWaiting(self.state.value))
            self.mailbox.wake()
