"""The choice of the next lane to pull from: weighted fair queueing in tokens, charged after the pull.

``resume`` comes first, then the high lanes share, then ``low``. Within one of these ranks every lane has a virtual
time, the tokens it has been given divided by its tenants' weights, and the lane of the least is next (start-time fair
queueing). What a job costs is known only when it is here, so it is charged then, as if it made all the tokens it may,
and settled when it has ended. A lane that was empty starts from where the others are: idleness saves up no credit.

Nothing in here waits or sends; `consumer` does.
"""

import heapq
import math
from collections.abc import Mapping
from typing import Final

from pool_worker.generation import prompt_tokens_of
from protocol import subjects
from protocol.job import Job

CHECK_S: Final = 0.025  # what was learned longer ago of a lane that is not watched may be wrong by now
LEAST_WEIGHT: Final = 0.01
MEAN_OF_JOBS: Final = 8  # about so many of the last jobs make up the mean that is expected of the next one

RESUME_RANK, HIGH_RANK, LOW_RANK = range(3)


def expected_tokens(job: Job) -> int:
    """Return the most tokens that a job can cost: its prompt, and all the output that is still to make."""
    resumed = sum(len(point.token_ids) // 4 for point in job.resume)
    return prompt_tokens_of(job) + max(0, job.sampling.max_tokens * job.sampling.n - resumed)


class Lane:
    """One lane of one model's queue: its known backlog, and the work it has been given."""

    __slots__ = ("expected", "model", "name", "queue", "rank", "seen_s", "served", "waiting")

    def __init__(self, model: str, name: str, *, trusted: bool = False) -> None:
        self.model = model
        self.queue = subjects.queue_of(model, trusted=trusted)
        self.name = name
        self.rank = {subjects.RESUME_LANE: RESUME_RANK, subjects.LOW_LANE: LOW_RANK}.get(name, HIGH_RANK)
        self.waiting = 0  # jobs that are believed to be in the queue
        self.seen_s = -math.inf  # monotonic clock: when that was learned
        self.served = 0.0  # virtual time
        self.expected = 0.0  # of one job, in virtual time; 0: none has come yet

    def is_stale(self, now_s: float) -> bool:
        """Report whether jobs may have arrived that were not reported."""
        return self.waiting == 0 and now_s - self.seen_s > CHECK_S


class LaneShares:
    """The virtual times of all lanes of one worker."""

    def __init__(self) -> None:
        self._now = [0.0, 0.0, 0.0]  # by rank: the virtual time at which a lane was last served
        self._expected = 1.0  # of a job of any lane

    def learn(self, lane: Lane, waiting: int, now_s: float) -> None:
        """Note how many jobs wait in a lane."""
        if waiting and not lane.waiting:
            lane.served = max(lane.served, self._now[lane.rank])
        lane.waiting = waiting
        lane.seen_s = now_s

    def charge(self, lane: Lane, tokens: int, weight: float) -> None:
        """Put a job that was pulled on the lane's account."""
        cost = tokens / max(weight, LEAST_WEIGHT)
        self._now[lane.rank] = max(self._now[lane.rank], lane.served)
        lane.served += cost
        lane.expected += (cost - lane.expected) / MEAN_OF_JOBS if lane.expected else cost
        self._expected += (cost - self._expected) / MEAN_OF_JOBS

    def settle(self, lane: Lane, tokens: int, weight: float) -> None:
        """Correct the account when a job has ended, by ``tokens`` more (or mostly fewer) than it was charged."""
        lane.served += tokens / max(weight, LEAST_WEIGHT)

    def divide(self, places: int, waiting: Mapping[Lane, int], coming: Mapping[Lane, int]) -> dict[Lane, int]:
        """Say how many jobs to ask each lane for, so that ``places`` are filled in fair order.

        ``waiting`` are the jobs that may be asked for, ``coming`` those that have been and are not here yet.
        """
        order = [
            (lane.rank, lane.served + coming.get(lane, 0) * self._cost_of_next(lane), number, lane)
            for number, (lane, jobs) in enumerate(waiting.items())
            if jobs > 0
        ]
        heapq.heapify(order)
        asked: dict[Lane, int] = {}
        while order and places > 0:
            rank, served, number, lane = order[0]
            asked[lane] = asked.get(lane, 0) + 1
            places -= 1
            if asked[lane] < waiting[lane]:
                heapq.heapreplace(order, (rank, served + self._cost_of_next(lane), number, lane))
            else:
                heapq.heappop(order)
        return asked

    def _cost_of_next(self, lane: Lane) -> float:
        return lane.expected or self._expected
