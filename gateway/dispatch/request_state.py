"""The data of one open request: what its state machine changes, and what others read."""

import asyncio
from collections.abc import Callable, Sequence

from gateway.admission.control import Ticket
from gateway.dispatch.actions import Actions
from gateway.dispatch.attempts import AttemptLog, CurrentAttempt
from gateway.dispatch.chat_choices import choices_of
from gateway.dispatch.deadlines import QueueWaitBudget
from gateway.request.mailbox import Ended, Failure, Mailbox
from gateway.request.states import State
from gateway.settings import TimeoutSettings
from protocol.job import Accepted, Heartbeat
from protocol.usage import RequestRecord


class RequestState:
    """An open request's data and what can be read of it. ``OpenRequest`` alone changes it."""

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
        self.current = CurrentAttempt(1, queued_s=now_s, last_frame_s=now_s)
        self.log = AttemptLog(max_attempts)
        self.accepted: Accepted | None = None  # of the last attempt that was accepted
        self.published_s: float | None = None  # when the first attempt was first handed to the queue server
        self.choices = choices_of(admission)
        self._unreceived_tokens = 0  # of a stopped or failed attempt, as its worker says, and as it can have made
        self.cached_tokens = 0
        self.accepted_s: float | None = None
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        self.outcome = "ok"  # "ok" | "cancelled" | "failed"; final once ENDED
        self.failure: Failure | None = None
        self.row: asyncio.Future[None] | None = None  # done: the request will have a row; None: not seen to yet
        self.record: RequestRecord | None = None  # once it is left for the ledger
        self.http_status: int | None = None  # as sent, if it was; set by the HTTP side
        self.dropped: frozenset[str] = frozenset()  # fields that the pools of its answer have left out
        self.hosted_wait: str | None = None  # why it is at no hosted pool, though it may: gateway.dispatch.hosted_pools
        self.closed = False  # the HTTP side has let go
        self.on_end: Callable[[Ended], None] | None = None  # called when the caller's verdict is known
        self._timeouts = timeouts
        self._actions = actions
        self._queue_wait = QueueWaitBudget(admission.queue_wait_s)
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
        total_s = self.admission.received_s + self._timeouts.total_s
        return min(self.current.queued_s + self._queue_wait.left_s, total_s, self.admission.deadline_s)

    @property
    def completion_tokens(self) -> int:
        """Output tokens over all choices and attempts; exact once ENDED."""
        return self.choices.held_tokens() + self._unreceived_tokens

    @property
    def attempt_tokens(self) -> int:
        """Output tokens of the current attempt, as far as they have come."""
        return self.choices.held_tokens() - self.current.tokens_before

    def takers(self) -> Sequence[Heartbeat]:
        """Return the live workers that could run the next attempt."""
        return self._actions.takers(self)

    def waits_for_worker(self, attempt: int) -> bool:
        """Return whether this attempt is the current one and not yet accepted."""
        return self.state is State.QUEUED and self.current.number == attempt
