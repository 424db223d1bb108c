"""One request and random events in any order: only the state machine, without a queue or a network.

Workers generate the correct answer. The network loses, repeats and reorders their frames; workers fail, fall silent,
are lost, and two may run the same attempt. Clients leave, and time passes. In all cases the client reads a prefix of
the correct answer, and the request ends and is settled exactly once. Each seed is another history.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import pytest

from gateway.dispatch.lifecycle import WITHDRAW_LINGER_S, OpenRequest, State
from gateway.errors import Failure
from gateway.request.mailbox import Ended, Event, Mailbox
from gateway.settings import TimeoutSettings
from protocol.errors import ErrorCode
from protocol.job import Accepted, Failed, Finished, Frame, ResumePoint, Tokens
from tests.unit.gateway.dispatch.opened_requests import ID, RecordedActions, failed, finished, open_request

WORKERS: Final = ("w1", "w2", "w3")
ANSWER: Final = "abcdefghijkl"  # of each choice; one token per character
MAX_TOKENS: Final = 100  # of each choice, as in the tests' open requests
HISTORIES: Final = 2500
STEPS: Final = 90
CODES: Final = ("engine_error", "engine_died", "worker_draining", "engine_busy", "unknown_attempt", "deadline_exceeded")


def taken(mailbox: Mailbox) -> list[Event]:
    """Return the available events without waiting."""
    if not len(mailbox):
        return []
    try:
        mailbox.take().send(None)
    except StopIteration as done:
        events: list[Event] = done.value
        return events
    raise AssertionError("it waits, though there is something")


@dataclass
class Attempt:
    """An attempt on one worker, with all its frames."""

    worker_id: str
    number: int
    made: list[int]  # tokens of each choice, including resumed ones
    frames: list[Frame]
    begun: int = 0  # resumed tokens, over all choices
    is_over: bool = False

    def __post_init__(self) -> None:
        self.begun = sum(self.made)

    def step(self, index: int) -> Frame:
        """Generate the next token of a choice or, when all are complete, the final frame."""
        left = [one for one, tokens in enumerate(self.made) if tokens < len(ANSWER)]
        if not left:
            return self.finish(cancelled=False)
        index = left[index % len(left)]
        token = self.made[index]
        self.made[index] += 1
        reason = "stop" if self.made[index] == len(ANSWER) else None
        frame = Tokens(ID, self.number, len(self.frames), index, (token,), ANSWER[token], reason)
        self.frames.append(frame)
        return frame

    def finish(self, *, cancelled: bool) -> Frame:
        tokens = sum(self.made) - self.begun
        return self.end(finished(len(self.frames), self.number, cancelled=cancelled, completion_tokens=tokens))

    def end(self, frame: Finished | Failed) -> Frame:
        self.is_over = True
        self.frames.append(frame)
        return frame


class Jobs(RecordedActions):
    """Actions that also keep each attempt's job: a worker may pull one just before it is withdrawn."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[int, tuple[ResumePoint, ...]] = {}

    def publish(self, request: OpenRequest, after_s: float) -> None:
        super().publish(request, after_s)
        self.jobs[request.attempt] = request.choices.resume_points()


@dataclass
class History:
    """The random history of one request."""

    seed: int
    now_s: float = 0.0
    attempts: list[Attempt] = field(default_factory=list)
    in_transit: list[tuple[str, Frame]] = field(default_factory=list)
    ends: list[Ended] = field(default_factory=list)
    is_closed: bool = False
    has_lied: bool = False  # any worker
    reported: set[int] = field(default_factory=set)  # attempts whose worker reported their end in time

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.n = self.random.randint(1, 2)
        self.read = [""] * self.n
        self.actions = Jobs()
        self.request, _ = open_request(
            self.n,
            stream=self.random.random() < 0.5,
            max_attempts=self.random.randint(1, 4),
            actions=self.actions,
        )
        self.actions.publish(self.request, 0.0)
        self.weights = {
            self.a_worker_pulls: 12,
            self.a_worker_makes_tokens: 20,
            self.frames_arrive: 24,
            self.workers_hear_of_orders: 6,
            self.time_passes: 6,
            self.a_late_worker_pulls: 2,
            self.a_frame_arrives_before_others: 4,
            self.a_frame_is_lost: 2,
            self.a_worker_fails: 2,
            self.a_worker_lies: 1,
            self.a_worker_is_lost: 2,
            self.the_job_is_gone: 2,
            self.the_worker_is_probed: 2,
            self.it_is_given_up: 0.5,
            self.its_answer_is_sent: 3,
        }
        # Each history draws its own rates of faults, so that some are long and others are dominated by one fault.
        for trouble in list(self.weights)[5:-1]:
            self.weights[trouble] *= self.random.choice([0, 0, 1, 4])

    def run(self) -> None:
        """Run the history. Raises AssertionError with the events so far."""
        happened: list[str] = []
        try:
            for step in self.random.choices(list(self.weights), list(self.weights.values()), k=STEPS):
                happened.append(step.__name__)
                step()
                self.check()
            happened.append("all_leave")
            self.all_leave()
        except Exception as error:
            error.add_note(f"seed {self.seed}: {', '.join(happened)}")
            raise

    # --- workers ------------------------------------------------------------------------------------------------------

    def a_worker_pulls(self) -> None:
        if self.request.state is State.QUEUED:
            self._pull(self.request.attempt)

    def a_late_worker_pulls(self) -> None:
        """Pull the job of an ended attempt, or of one that another worker has."""
        self._pull(max(1, self.request.attempt - self.random.randint(0, 1)))

    def _pull(self, number: int) -> None:
        worker = self.random.choice(WORKERS)
        if any((one.worker_id, one.number) == (worker, number) for one in self.attempts):
            return
        made = [0] * self.n
        for point in self.actions.jobs[number]:
            made[point.index] = len(point.token_ids) // 4
        accepted = Accepted(ID, number, 0, worker, worker, "provider", "region", 1.0)
        self.attempts.append(Attempt(worker, number, made, [accepted]))
        self.in_transit.append((worker, accepted))

    def _running(self) -> list[Attempt]:
        return [one for one in self.attempts if not one.is_over]

    def a_worker_makes_tokens(self) -> None:
        if running := self._running():
            attempt = self.random.choice(running)
            for _ in range(self.random.randint(1, 6)):
                if not attempt.is_over:
                    self.in_transit.append((attempt.worker_id, attempt.step(self.random.randint(0, 1))))

    def a_worker_fails(self) -> None:
        if running := self._running():
            attempt, retryable = self.random.choice(running), self.random.random() < 0.8
            frame = failed(len(attempt.frames), attempt.number, self.random.choice(CODES), retryable=retryable)
            self.in_transit.append((attempt.worker_id, attempt.end(frame)))

    def a_worker_lies(self) -> None:
        """Report implausibly many tokens, a premature end, or a second acceptance."""
        if running := self._running():
            self.has_lied = True
            attempt = self.random.choice(running)
            seq = len(attempt.frames)
            if self.random.random() < 0.5:
                lie: Frame = attempt.end(finished(seq, attempt.number, completion_tokens=10**9))
            else:
                lie = Accepted(ID, attempt.number, seq, attempt.worker_id, "pool", "provider", "region", 1.0)
                attempt.frames.append(lie)
            self.in_transit.append((attempt.worker_id, lie))

    def a_worker_is_lost(self) -> None:
        """Close its connection; its frames may still arrive."""
        worker = self.random.choice(WORKERS)
        for attempt in self.attempts:
            attempt.is_over = attempt.is_over or attempt.worker_id == worker
        if self.request.worker_id == worker:
            self.request.worker_lost(ErrorCode.WORKER_LOST, "its connection closed", self.now_s)

    def workers_hear_of_orders(self) -> None:
        """Deliver resend and cancel messages, some of which are lost."""
        asked, cancelled = self.actions.asked[:], self.actions.cancelled[:]
        self.actions.asked.clear()
        self.actions.cancelled.clear()
        if self.random.random() < 0.1:
            return
        for worker, number, from_seq in asked:
            for attempt in self._of(worker, number):
                self.in_transit += [(worker, frame) for frame in attempt.frames[from_seq:]]
        for worker, order in cancelled:
            for attempt in self._of(worker, order.attempt):
                if not attempt.is_over:
                    self.in_transit.append((worker, attempt.finish(cancelled=True)))

    def _of(self, worker: str, number: int) -> list[Attempt]:
        return [one for one in self.attempts if (one.worker_id, one.number) == (worker, number)]

    # --- network ------------------------------------------------------------------------------------------------------

    def frames_arrive(self) -> None:
        count = self.random.randint(1, 8)
        arriving, self.in_transit = self.in_transit[:count], self.in_transit[count:]
        for worker, frame in arriving:
            self._arrives(worker, frame)

    def a_frame_arrives_before_others(self) -> None:
        """Deliver a frame out of order, possibly twice."""
        if self.in_transit:
            which = self.random.randrange(len(self.in_transit))
            worker, frame = self.in_transit[which]
            if self.random.random() < 0.5:
                del self.in_transit[which]
            self._arrives(worker, frame)

    def _arrives(self, worker: str, frame: Frame) -> None:
        request, fenced = self.request, len(self.actions.fenced)
        is_stale = request.is_over or frame.attempt != request.attempt or request.worker_id not in {worker, None}
        is_next = frame.seq == request.current.next_seq
        request.on_frame(worker, frame, self.now_s)
        assert len(self.actions.fenced) - fenced == is_stale, "a worker with an unowned attempt gets a Cancel"
        if isinstance(frame, Finished | Failed) and not is_stale and is_next:
            self.reported.add(frame.attempt)

    def a_frame_is_lost(self) -> None:
        if self.in_transit:
            del self.in_transit[self.random.randrange(len(self.in_transit))]

    # --- queue, caller, time ------------------------------------------------------------------------------------------

    def the_job_is_gone(self) -> None:
        """Move the job, or let it vanish."""
        attempt = self.request.attempt
        if self.random.random() < 0.5:
            self.request.move(attempt, None, self.now_s)
        else:
            self.request.job_vanished(attempt, self.now_s)

    def time_passes(self) -> None:
        self.now_s += self.random.choice([0.0, 0.25, 0.25, 1.0, 1.0, 2.5, 6.0])
        if not self.request.is_over:
            self.request.on_tick(self.now_s, connected=self.random.random() < 0.9)

    def the_worker_is_probed(self) -> None:
        self.request.probe(self.now_s)

    def it_is_given_up(self) -> None:
        what = self.random.randrange(4)
        if what == 0:
            self.request.cancel(self.now_s)
        elif what == 1:
            self.request.fail(Failure(ErrorCode.KEY_REVOKED, "revoked"), self.now_s)
        elif what == 2:
            self.request.refused(self.request.attempt, Failure(ErrorCode.OVERLOADED, "full"), self.now_s)
        elif not self.ends:
            self.request.give_up_unread(self.now_s)

    def its_answer_is_sent(self) -> None:
        if self.ends and not self.is_closed:
            self.request.close(200 if self.ends[0].failure is None else 500, self.now_s)
            self.is_closed = True

    def all_leave(self) -> None:
        """After its client has left, the request is settled soon."""
        self.request.close(None, self.now_s)
        self.is_closed = True
        if not self.request.is_over:
            self.request.on_tick(self.now_s + max(WITHDRAW_LINGER_S, TimeoutSettings().cancel_s), connected=True)
        assert self.request.state is State.SETTLED
        self.check()

    # --- invariants ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        request, actions = self.request, self.actions
        for event in taken(request.mailbox):
            assert not self.ends, "nothing comes behind the end"
            if isinstance(event, Tokens):
                self.read[event.index] += event.text
            elif isinstance(event, Ended):
                self.ends.append(event)
        assert all(ANSWER.startswith(text) for text in self.read), f"it is not the answer: {self.read}"
        if self.ends and request.outcome == "ok":
            assert self.read == [ANSWER] * self.n
            assert request.completion_tokens == len(ANSWER) * self.n

        assert not (request.choices.are_complete() and request.state is State.QUEUED), "nothing is left to make"
        assert actions.ends == request.is_over
        assert len(actions.statuses) == (request.state is State.SETTLED)
        assert (request.state is State.SETTLED) == (request.is_over and self.is_closed)
        assert len(self.ends) == 1 or self.is_closed or request.state in {State.QUEUED, State.RUNNING}

        has_it = [] if request.worker_id is None or request.is_over else [(request.worker_id, request.attempt)]
        assert actions.held == has_it, "one worker has it, or none"
        assert actions.published == list(range(1, request.attempt + 1))
        lost = [number for number, *_ in actions.recorded]
        assert len(lost) == len(set(lost)), "a lost attempt is recorded once"
        assert self.reported.isdisjoint(lost), "a worker that reports the end also publishes the record"

        held, made = request.choices.held_tokens(), sum(sum(one.made) - one.begun for one in self.attempts)
        assert held <= request.completion_tokens <= MAX_TOKENS * self.n
        assert self.has_lied or request.completion_tokens <= made


@pytest.mark.parametrize("block", range(10))
def test_the_client_reads_the_correct_answer_and_the_request_ends_once(block: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(block * HISTORIES // 10, (block + 1) * HISTORIES // 10):
        history = History(seed)
        history.run()
        outcomes[history.request.outcome] += 1
        outcomes["rescued"] += history.request.outcome == "ok" and history.request.attempt > 1
    assert min(outcomes[one] for one in ("ok", "failed", "cancelled", "rescued")) > HISTORIES / 200, outcomes
