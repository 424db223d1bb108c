"""A request's current attempt, and the log of earlier ones, which decides whether, when and where to retry."""

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

# Failures that do not count: the worker drained, or none had begun.
FREE_CODES: Final = {
    ErrorCode.WORKER_DRAINING,
    ErrorCode.JOB_VANISHED,
    ErrorCode.GATEWAY_LOST,
    ErrorCode.ENGINE_BUSY,
}
MAX_FREE_FAILURES: Final = 32  # in a row and without a new token
MAX_BUSY_FAILURES: Final = 256  # waits that servers asked of one request; its queue wait limit usually ends it first
PROGRESS_ALLOWANCE: Final = 4  # while every attempt generates tokens, ``max_attempts`` times this many may fail
MAX_PURCHASES: Final = 2  # of one answer from servers that break it off
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0

SILENCE_LIMIT_S: Final = 2.0  # an accepted request without a frame for longer is probed
PROBE_PERIOD_S: Final = 1.0
MAX_PROBES: Final = 3
RESEND_GAP_S: Final = 0.25  # between two requests to resend the same frames
GAP_LIMIT_S: Final = 5.0  # a gap open for longer is a failed attempt
# Tokens that a worker reports beyond those received were lost in transit, or are false. Workers send frames as they
# generate, so lost tokens were generated after the last received frame, no faster than the fastest engine could.
FASTEST_TOKENS_PER_S: Final = 1000
ON_THEIR_WAY_S: Final = 1.0


@dataclass(slots=True)
class CurrentAttempt:
    """State of the current attempt. Times are on the monotonic clock."""

    number: int
    queued_s: float  # when it was, or will be, published
    last_frame_s: float  # when its worker's last frame arrived
    tokens_before: int = 0  # output tokens already held when it began
    is_encoded: bool = False  # it resumes from token ids encoded from text: ResumePoint.is_encoded
    hosted: HostedSlot | None = None  # at the hosted pool that it waits for or runs on; None: own workers
    is_rescue: bool = False  # an earlier attempt was accepted: this one goes first
    is_moved: bool = False  # the previous one was withdrawn to wait elsewhere; it did not fail
    stream_sequence: int | None = None  # of its message in the stream; None: not stored yet, or possibly lost
    stored_at: int | None = None  # its last known sequence; after a reconnect it may be another job's
    worker_id: str | None = None  # the first that accepted it; others are fenced off
    accepted: Accepted | None = None
    accepted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None  # or vector
    answered_inputs: int = 0  # of a pooling job
    next_seq: int = 0
    gap_since_s: float | None = None
    asked_s: float = float("-inf")  # when frames were last requested again
    probes: int = 0  # unanswered
    timings: Timings | None = None  # reported by its worker at the end, if plausible

    @property
    def is_back(self) -> bool:
        """True if a hosted pool did not take it, and it waits for our own workers again."""
        return self.is_moved and self.hosted is None

    def take_final_frame(self, frame: Finished | Failed, now_s: float) -> None:
        """Note the counts and timings of the worker's last frame."""
        self.timings = plausible_timings(frame.timings, now_s - self.queued_s)
        if self.hosted is not None:
            self.hosted.take_final_frame(frame)

    def max_unreceived_tokens(self, now_s: float) -> int:
        """Return how many tokens of each choice may have been generated since the last frame arrived."""
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
        """Return why its worker is considered lost, or None."""
        if self.gap_since_s is not None and now_s - self.gap_since_s >= GAP_LIMIT_S:
            return "the worker did not resend lost frames"
        if self.is_too_silent(now_s) and self.probes >= MAX_PROBES:
            return f"worker {self.worker_id} does not answer"
        return None


@dataclass(slots=True)
class TimeSpent:
    """Time of a request by phase, over all accepted attempts; the phases do not overlap.

    Engine times are reported by the worker. For a lost worker they are the gateway's: from acceptance to the first
    token counts as prefill, from there to the last token as decode; without a token nothing is known. The rest of the
    total is transit of jobs and frames, and the time to detect lost workers.
    """

    waited_ms: float = 0.0  # for workers
    engine_queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    preemptions: int = 0

    def add(self, attempt: CurrentAttempt) -> None:
        """Add an attempt that has ended."""
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
    """Return the codes of failed attempts as text: ``worker_lost, 2 x engine_error``."""
    counts = Counter([failure.code for failure in failures])
    return ", ".join([code if n == 1 else f"{n} x {code}" for code, n in counts.items()])


class AttemptLog:
    """Failures of one request, and the retry decisions that follow from them.

    Real failures count: a lost worker, an engine error, an implausible frame. An attempt that generated tokens proves
    that the request can be served, so it restarts the count, within an allowance. A long answer thus survives many
    lost workers, but a request that kills every worker does not.
    """

    def __init__(self, max_attempts: int) -> None:
        self.failures: list[AttemptFailure] = []
        self.spent = TimeSpent()
        self.hosted_failed: set[str] = set()  # hosted pools that are not retried
        self.failed_pools: set[str] = set()  # on which an attempt failed
        self._max_attempts = max_attempts
        self._avoided: list[str] = []
        self._real = 0
        self._fruitless = 0  # real failures since the last attempt that generated tokens, including it
        self._free = 0  # failures since then that do not count
        self._busy = 0
        self._breaks: set[tuple[str, ...]] = set()  # how and where servers broke the answer off
        self._dropped = 0  # partial answers that were dropped and requested again
        self.is_repeated = False  # a server broke the answer off twice at the same point

    def add(self, attempt: CurrentAttempt, code: str, reason: str, tokens: int, *, is_excused: bool = False) -> None:
        """Add a failed attempt that generated ``tokens``; ``is_excused``: its pool is at fault, and others live."""
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
        """Note where a server failed: the same failure at the same point is caused by the answer, not by the worker.

        The point is the position in the answer, or in the attempt's own output if the server restarted the answer.
        """
        made, held = ("made", pool, reason, str(tokens)), ("held", pool, reason, str(held_tokens))
        self.is_repeated = self.is_repeated or (bool(tokens) and made in self._breaks) or held in self._breaks
        if tokens:
            self._breaks |= {made, held}

    def drop(self) -> bool:
        """Note that the partial answer is dropped; return whether it may be paid for again."""
        self._dropped += self.failures[-1].code == ErrorCode.ENGINE_ERROR
        return self._dropped < MAX_PURCHASES

    def avoid_worker(self, worker_id: str) -> None:
        """Avoid a worker that wrongly refused the request."""
        self._avoided.append(worker_id)

    @property
    def exhausted(self) -> bool:
        """True if there is no further attempt: too many failed."""
        return (
            self._fruitless >= self._max_attempts
            or self._real >= self._max_attempts * PROGRESS_ALLOWANCE
            or self._free >= MAX_FREE_FAILURES
        )

    @property
    def is_busy_too_often(self) -> bool:
        """True if there is no further attempt: servers asked to wait too often."""
        return self._busy >= MAX_BUSY_FAILURES

    @property
    def was_asked_to_wait(self) -> bool:
        """True if the last attempt ended because its server asked to wait."""
        return bool(self.failures) and self.failures[-1].code == ErrorCode.ENGINE_BUSY

    @property
    def pause_s(self) -> float:
        """Pause before the next attempt in seconds: none the first time, then increasing.

        The jitter separates a request that kills its workers from the requests that ran beside it.
        """
        in_a_row = max(self._fruitless, len(self._avoided))
        if in_a_row < 2:
            return 0.0
        longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (in_a_row - 2))
        return longest_s * random.uniform(0.5, 1.0)  # noqa: S311

    @property
    def avoid(self) -> tuple[str, ...]:
        """Workers on which an attempt failed, without drained ones."""
        failed = [failure.worker_id for failure in self.failures if failure.code not in FREE_CODES]
        return tuple(dict.fromkeys([worker_id for worker_id in (*failed, *self._avoided) if worker_id is not None]))

    def why(self, attempts: int) -> str:
        """Return the failures in one line; ``attempts``: the number of all attempts, as in response headers."""
        codes, failed = counted_codes(self.failures), len(self.failures)
        # The others were moved to another pool before a worker accepted them, or another gateway published them.
        counted = "attempts failed" if failed == attempts else f"attempts, of which {failed} failed"
        return f"{attempts} {counted} ({codes}); the last: {self.failures[-1].reason}"
