"""A request's current attempt and the log of earlier ones, which decides whether, when and where there is another."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gateway.dispatch.choices import plausible_timings
from gateway.dispatch.hosted import HostedSlot
from protocol.errors import ErrorCode
from protocol.job import Accepted, Failed, Finished, Timings
from protocol.usage import AttemptFailure

# Nobody's fault: the worker left in order, or none had begun.
FREE_CODES: Final = {
    ErrorCode.WORKER_DRAINING,
    ErrorCode.JOB_VANISHED,
    ErrorCode.GATEWAY_LOST,
    ErrorCode.ENGINE_BUSY,
}
MAX_FREE_FAILURES: Final = 32  # in a row and without a new token
MAX_BUSY_FAILURES: Final = 256  # times that servers asked one request to wait; what usually ends it is its time to wait
PROGRESS_ALLOWANCE: Final = 4  # while every attempt makes tokens, so many times ``max_attempts`` may fail
MAX_PURCHASES: Final = 2  # of an answer whose server breaks it off
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0

SILENCE_LIMIT_S: Final = 2.0  # an accepted request without a frame for longer is asked after
PROBE_PERIOD_S: Final = 1.0
MAX_PROBES: Final = 3
RESEND_GAP_S: Final = 0.25  # between two requests to send the same frames again
GAP_LIMIT_S: Final = 5.0  # a gap open for longer is a failed attempt
# What a worker says to have made beyond what came here was lost on its way, or is a lie. Frames leave as tokens are
# made, so what is missing was made since the last that came: no faster than any engine makes tokens for one answer.
FASTEST_TOKENS_PER_S: Final = 1000
ON_THEIR_WAY_S: Final = 1.0


@dataclass(slots=True)
class CurrentAttempt:
    """State of the current attempt. Times are of the monotonic clock."""

    number: int
    queued_s: float  # when it was handed to the queue, or is to be
    last_frame_s: float  # of its worker
    tokens_before: int = 0  # output tokens held when it began
    is_encoded: bool = False  # it begins with token ids that were made of a text: ResumePoint.is_encoded
    hosted: HostedSlot | None = None  # at the pool whose lane it waits in, or runs at; None: our own workers
    is_rescue: bool = False  # one of its request's attempts was taken before: it goes first
    is_moved: bool = False  # the one before was withdrawn, to wait elsewhere, and has not failed
    stream_sequence: int | None = None  # of its message; None: not stored yet, or perhaps lost
    stored_at: int | None = None  # its last known sequence, which after a reconnect may be another job's
    worker_id: str | None = None  # the first that accepted it: others are fenced out
    accepted: Accepted | None = None
    accepted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None  # or vector
    answered_inputs: int = 0  # of a pooling job
    next_seq: int = 0
    gap_since_s: float | None = None
    asked_s: float = float("-inf")  # when frames were last asked for again
    probes: int = 0  # without an answer
    timings: Timings | None = None  # as its worker tells at the end, where that is plausible

    @property
    def is_back(self) -> bool:
        """True if a hosted pool did not take it and it waits for our own workers again."""
        return self.is_moved and self.hosted is None

    def take_final_frame(self, frame: Finished | Failed, now_s: float) -> None:
        """Note the counts and timings of the worker's last frame."""
        self.timings = plausible_timings(frame.timings, now_s - self.queued_s)
        if self.hosted is not None:
            self.hosted.take_final_frame(frame)

    def max_unreceived_tokens(self, now_s: float) -> int:
        """Return how many tokens of each choice may have been generated since the last one that arrived."""
        last_frame_s = self.last_token_s or self.accepted_s or self.queued_s
        return int((now_s - last_frame_s + ON_THEIR_WAY_S) * FASTEST_TOKENS_PER_S)

    def should_request_resend(self, now_s: float) -> bool:
        """Note that frames are missing; return whether it is time to ask for them."""
        if self.gap_since_s is None:
            self.gap_since_s = now_s
        if now_s - self.asked_s < RESEND_GAP_S:
            return False
        self.asked_s = now_s
        return True

    def is_too_silent(self, now_s: float) -> bool:
        """Return whether its worker should be probed."""
        return now_s - self.last_frame_s >= SILENCE_LIMIT_S and now_s - self.asked_s >= PROBE_PERIOD_S

    def why_lost(self, now_s: float) -> str | None:
        """Return why its worker counts as lost, or None."""
        if self.gap_since_s is not None and now_s - self.gap_since_s >= GAP_LIMIT_S:
            return "lost frames were not sent again"
        if self.is_too_silent(now_s) and self.probes >= MAX_PROBES:
            return f"worker {self.worker_id} does not answer"
        return None


@dataclass(slots=True)
class TimeSpent:
    """Time of a request by phase, over all accepted attempts; the phases do not overlap.

    What the engine did is as its worker says. Of one that was lost it is as the gateway saw it: from acceptance to the
    first token counts as prefill, from there to the last one as decode; without a token nothing is known. What is
    missing to the whole is the way of jobs and frames, and the time it took to find out that a worker was lost.
    """

    waited_ms: float = 0.0  # for workers
    engine_queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    preemptions: int = 0

    def add(self, attempt: CurrentAttempt) -> None:
        """Add an attempt that is over."""
        if attempt.accepted_s is None:
            return
        self.waited_ms += (attempt.accepted_s - attempt.queued_s) * 1000
        if attempt.timings is not None:
            self.engine_queue_ms += attempt.timings.engine_queue_ms
            self.prefill_ms += attempt.timings.prefill_ms
            self.decode_ms += attempt.timings.decode_ms
            self.preemptions += attempt.timings.preemptions
        elif attempt.first_token_s is not None and attempt.last_token_s is not None:
            self.prefill_ms += (attempt.first_token_s - attempt.accepted_s) * 1000
            self.decode_ms += (attempt.last_token_s - attempt.first_token_s) * 1000


def counted_codes(failures: Iterable[AttemptFailure]) -> str:
    """Return the codes of failed attempts for people: ``worker_lost, 2 x engine_error``."""
    counts = Counter([failure.code for failure in failures])
    return ", ".join([code if n == 1 else f"{n} x {code}" for code, n in counts.items()])


class AttemptLog:
    """Failures of one request, and the retry decisions that follow from them.

    A failure counts in full where it was real: a worker lost in the middle, an engine's error, a lie. But an attempt
    that made tokens has shown that the request can be served: the count begins again with it, within an allowance, so
    that a long answer outlives many workers and a request that kills each of them does not.
    """

    def __init__(self, max_attempts: int) -> None:
        self.failures: list[AttemptFailure] = []
        self.spent = TimeSpent()
        self.hosted_failed: set[str] = set()  # hosted pools that are not tried again
        self.failed_pools: set[str] = set()  # where an attempt has failed
        self._max_attempts = max_attempts
        self._avoided: list[str] = []
        self._real = 0
        self._fruitless = 0  # real ones since the last that made tokens, that one included
        self._free = 0  # free ones since then
        self._busy = 0
        self._breaks: set[tuple[str, ...]] = set()  # how and where servers have broken answers off
        self._dropped = 0  # answers that were begun and are asked for from their beginning
        self.is_repeated = False  # a server has broken the answer off twice at the same place

    def add(self, attempt: CurrentAttempt, code: str, reason: str, tokens: int, *, is_excused: bool = False) -> None:
        """Add a failed attempt, which produced ``tokens``; ``is_excused``: its pool is to blame, and others live."""
        if code == ErrorCode.ENGINE_ERROR and attempt.accepted is not None:
            self._note_break(attempt.accepted.pool, reason, tokens, attempt.tokens_before + tokens)
        self.failures.append(AttemptFailure(attempt.number, attempt.worker_id, code, reason, tokens))
        if attempt.hosted is not None and code not in {ErrorCode.WORKER_LOST, *FREE_CODES}:
            self.hosted_failed.add(attempt.hosted.pool.name)
        if tokens or attempt.answered_inputs:
            self._fruitless = self._free = 0
        if attempt.accepted is not None and code not in FREE_CODES:
            self.failed_pools.add(attempt.accepted.pool)
        if code == ErrorCode.ENGINE_BUSY:
            self._busy += 1
        elif attempt.worker_id is None or code in FREE_CODES or is_excused:
            self._free += 1
        else:
            self._real += 1
            self._fruitless += 1

    def _note_break(self, pool: str, reason: str, tokens: int, held_tokens: int) -> None:
        """Note where a server has failed: the same fault at the same place is the answer's, and not the worker's.

        The place is that in the answer, or that in what one attempt made, where a server begins it again.
        """
        made, held = ("made", pool, reason, str(tokens)), ("held", pool, reason, str(held_tokens))
        self.is_repeated = self.is_repeated or (bool(tokens) and made in self._breaks) or held in self._breaks
        if tokens:
            self._breaks |= {made, held}

    def drop(self) -> bool:
        """Note that what was made is dropped; return whether the answer may be bought again."""
        self._dropped += self.failures[-1].code == ErrorCode.ENGINE_ERROR
        return self._dropped < MAX_PURCHASES

    def avoid_worker(self, worker_id: str) -> None:
        """Avoid a worker that refused wrongly."""
        self._avoided.append(worker_id)

    @property
    def exhausted(self) -> bool:
        """True if there is no further attempt."""
        return (
            self._fruitless >= self._max_attempts
            or self._real >= self._max_attempts * PROGRESS_ALLOWANCE
            or self._free >= MAX_FREE_FAILURES
        )

    @property
    def is_busy_too_often(self) -> bool:
        """True if there is no further attempt, as servers have asked too often to wait."""
        return self._busy >= MAX_BUSY_FAILURES

    @property
    def was_asked_to_wait(self) -> bool:
        """True if the last attempt ended because its server is busy."""
        return bool(self.failures) and self.failures[-1].code == ErrorCode.ENGINE_BUSY

    @property
    def pause_s(self) -> float:
        """Pause before the next attempt in seconds: none the first time, then ever longer.

        The jitter parts a request that kills its workers from those that ran beside it.
        """
        in_a_row = max(self._fruitless, len(self._avoided))
        if in_a_row < 2:
            return 0.0
        longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (in_a_row - 2))
        return longest_s * random.uniform(0.5, 1.0)  # noqa: S311

    @property
    def avoid(self) -> tuple[str, ...]:
        """Workers on which an attempt failed, without those that drained in order."""
        failed = [failure.worker_id for failure in self.failures if failure.code not in FREE_CODES]
        return tuple(dict.fromkeys([worker_id for worker_id in (*failed, *self._avoided) if worker_id is not None]))

    def why(self, attempts: int) -> str:
        """Return the failures in one line; ``attempts``: all of them, as headers have it."""
        codes, failed = counted_codes(self.failures), len(self.failures)
        # The others were moved to another pool before a worker had them, or belong to a gateway that is gone.
        counted = "attempts failed" if failed == attempts else f"attempts, of which {failed} failed"
        return f"{attempts} {counted} ({codes}); the last: {self.failures[-1].reason}"
