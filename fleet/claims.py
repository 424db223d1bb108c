"""How much is believed of what workers say they have done: what the queue server and the ledger bear out.

A stolen worker may say anything, and what is believed once stays in the forecast for weeks. It can say neither how many
jobs have left the queue, nor what requests have taken as gateways count it.
"""

from collections import deque
from typing import Final

TOLD_S: Final = 60.0  # how long after a job has left the queue a worker may say that it has taken it
MOST_TIMES: Final = 8.0  # so many times the tokens of the ledger's requests a job may take on the average
CREDIT_JOBS: Final = 500.0  # that may run with all of their tokens still to come


class Claims:
    """What the workers of a group may have done. Pure: no I/O, no clock."""

    def __init__(self, tokens_per_job: float) -> None:
        """``tokens_per_job``: what is expected until the ledger knows of requests."""
        self._most_tokens = MOST_TIMES * tokens_per_job  # of a job, on the average
        self._tokens = CREDIT_JOBS * self._most_tokens  # that may have been made, and were not said to be
        self._jobs = 0  # that may have been taken, likewise
        self._left: deque[tuple[float, int]] = deque()  # (time, jobs that have left the queue), oldest first

    def expect(self, tokens_per_request: float) -> None:
        """Remember what requests have taken in the last while."""
        self._most_tokens = MOST_TIMES * tokens_per_request
        self._tokens = min(self._tokens, CREDIT_JOBS * self._most_tokens)

    def bounded(self, tokens_per_job: float) -> float:
        """Return what may be believed of a job's size."""
        return min(tokens_per_job, self._most_tokens)

    def note_left(self, jobs: int, now_s: float) -> None:
        """Note that so many jobs have left the queue since the last time, at most."""
        while self._left and self._left[0][0] <= now_s - TOLD_S:
            self._left.popleft()
        self._left.append((now_s, jobs))
        self._jobs = min(self._jobs + jobs, sum(count for _, count in self._left))

    def take_jobs(self, jobs: int, batch_jobs: int) -> tuple[int, int]:
        """Return how many jobs that were said to be taken can have been, and how many of these are batch jobs.

        ``batch_jobs``: of ``jobs``. Where not all can have been, interactive ones are believed first: they are what
        machines are launched for at once.
        """
        interactive = min(jobs - batch_jobs, self._jobs)
        batch = min(batch_jobs, self._jobs - interactive)
        self._jobs -= interactive + batch
        return interactive + batch, batch

    def take_tokens(self, jobs: int, tokens: int) -> float:
        """Return the share that is believed of the tokens that were made while so many jobs were taken."""
        credit = self._tokens + jobs * self._most_tokens
        believed = min(float(tokens), credit)
        self._tokens = min(credit - believed, CREDIT_JOBS * self._most_tokens)
        return believed / tokens if tokens else 1.0
