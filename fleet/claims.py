"""Limits on workers' reports of their work: only what the queue server and the ledger confirm is believed.

A compromised worker can report anything, and a false report affects the forecast for weeks. It cannot change how many
jobs have left the queue, nor the tokens that gateways have counted.
"""

from collections import deque
from typing import Final

TOLD_S: Final = 60.0  # how long after a job has left the queue a worker may report that it took the job
MOST_TIMES: Final = 8.0  # limit of a job's mean tokens, as a multiple of the ledger's mean
CREDIT_JOBS: Final = 500.0  # that may run with all of their tokens still to come


class Claims:
    """Limits of the work that a group's workers can have done. Pure: no I/O, no clock."""

    def __init__(self, tokens_per_job: float) -> None:
        """``tokens_per_job``: assumed until the ledger has requests."""
        self._most_tokens = MOST_TIMES * tokens_per_job  # of a job, on the average
        self._tokens = CREDIT_JOBS * self._most_tokens  # possibly generated and not reported
        self._jobs = 0  # that may have been taken, likewise
        self._left: deque[tuple[float, int]] = deque()  # (time, jobs that have left the queue), oldest first

    def expect(self, tokens_per_request: float) -> None:
        """Store the mean tokens of recent requests."""
        self._most_tokens = MOST_TIMES * tokens_per_request
        self._tokens = min(self._tokens, CREDIT_JOBS * self._most_tokens)

    def bounded(self, tokens_per_job: float) -> float:
        """Return the limit of a job's mean tokens."""
        return min(tokens_per_job, self._most_tokens)

    def note_left(self, jobs: int, now_s: float) -> None:
        """Store how many jobs at most have left the queue since the last call."""
        while self._left and self._left[0][0] <= now_s - TOLD_S:
            self._left.popleft()
        self._left.append((now_s, jobs))
        self._jobs = min(self._jobs + jobs, sum(count for _, count in self._left))

    def take_jobs(self, jobs: int, batch_jobs: int) -> tuple[int, int]:
        """Return how many of the reported jobs are plausible, and how many of these are batch jobs.

        ``batch_jobs``: of ``jobs``. Where not all can have been, interactive ones are believed first: they are what
        machines are launched for at once.
        """
        interactive = min(jobs - batch_jobs, self._jobs)
        batch = min(batch_jobs, self._jobs - interactive)
        self._jobs -= interactive + batch
        return interactive + batch, batch

    def take_tokens(self, jobs: int, tokens: int) -> float:
        """Return the plausible share of the reported tokens for this number of jobs."""
        credit = self._tokens + jobs * self._most_tokens
        believed = min(float(tokens), credit)
        self._tokens = min(credit - believed, CREDIT_JOBS * self._most_tokens)
        return believed / tokens if tokens else 1.0
