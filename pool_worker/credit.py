"""The engine's free capacity, and from it the number of jobs to pull.

A job's cost is known only after the pull, so the cost of the next jobs is estimated from the last ones. The worker
pulls as many as would fit if each were as large as the largest recent one, and one more only while the smallest recent
one would fit. A job that does not fit waits here, and nothing more is pulled meanwhile.

Batch jobs leave a reserve free, so that an interactive job finds room at once. An idle engine takes a batch job of any
size.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from pool_worker.engines.base import Capacity
from pool_worker.generation import prompt_tokens_of
from protocol.job import Job

RECENT_JOBS: Final = 64


@dataclass(frozen=True, slots=True)
class Cost:
    """The share of the engine that one job takes."""

    sequences: int
    kv_tokens: int


NOTHING: Final = Cost(0, 0)


class Credit:
    """The engine's free sequences and KV tokens. Pair every ``take`` with a ``give_back``."""

    def __init__(self, capacity: Capacity, batch_reserve: float = 0.0) -> None:
        """Make the credit of an idle engine; batch jobs leave ``batch_reserve``, a share from 0 to 1, free."""
        self.capacity = capacity
        self._reserve = reserve_of(capacity, batch_reserve)
        self.free_sequences = capacity.max_sequences
        self.free_kv_tokens = capacity.max_kv_tokens
        longest = Cost(1, min(capacity.max_model_len, capacity.max_kv_tokens))
        self._recent: deque[Cost] = deque(maxlen=RECENT_JOBS)
        self.note(longest)

    def cost_of(self, job: Job) -> Cost:
        """Return what a job takes: its prompt and its maximum output for every choice that still runs.

        Never more than the whole engine: a job with more choices than can run at once takes all of it. A job of many
        inputs takes at most half, because each step computes only some of them.
        """
        if job.pooling is not None:
            return Cost(1, min(prompt_tokens_of(job), self.capacity.max_kv_tokens // 2))
        sequences = job.sampling.n - sum(point.finish_reason is not None for point in job.resume)
        kv_tokens = sequences * (prompt_tokens_of(job) + job.sampling.max_tokens)
        return Cost(min(sequences, self.capacity.max_sequences), min(kv_tokens, self.capacity.max_kv_tokens))

    def fits(self, cost: Cost, *, is_batch: bool = False) -> bool:
        """Report whether the engine has capacity for it now."""
        free = self._free(is_batch=is_batch and not self._is_idle)
        return cost.sequences <= free.sequences and cost.kv_tokens <= free.kv_tokens

    def take(self, cost: Cost) -> None:
        """Reserve capacity."""
        self.free_sequences -= cost.sequences
        self.free_kv_tokens -= cost.kv_tokens

    def give_back(self, cost: Cost) -> None:
        """Release capacity."""
        self.free_sequences += cost.sequences
        self.free_kv_tokens += cost.kv_tokens

    def note(self, cost: Cost) -> None:
        """Remember the size of a pulled job."""
        self._recent.append(cost)
        self._largest = Cost(
            max(1, *(cost.sequences for cost in self._recent)), max(1, *(cost.kv_tokens for cost in self._recent))
        )
        self._smallest_kv_tokens = min(cost.kv_tokens for cost in self._recent)

    def jobs_to_pull(self, *, is_batch: bool = False) -> int:
        """Return how many jobs may be outstanding if none waits here."""
        free = self._free(is_batch=is_batch)
        if free.sequences <= 0:
            return 0
        jobs = min(free.sequences // self._largest.sequences, max(0, free.kv_tokens) // self._largest.kv_tokens)
        return jobs or int(self._is_idle or free.kv_tokens >= self._smallest_kv_tokens)

    @property
    def _is_idle(self) -> bool:
        return self.free_sequences == self.capacity.max_sequences

    def _free(self, *, is_batch: bool) -> Cost:
        reserve = self._reserve if is_batch else NOTHING
        return Cost(self.free_sequences - reserve.sequences, self.free_kv_tokens - reserve.kv_tokens)


def reserve_of(capacity: Capacity, share: float) -> Cost:
    """Return what batch jobs leave free: at least one sequence; nothing if there is only one or ``share`` is 0."""
    if share == 0 or capacity.max_sequences == 1:
        return NOTHING
    return Cost(max(1, int(share * capacity.max_sequences)), int(share * capacity.max_kv_tokens))
