"""Estimates of a waiting job's turn: pure arithmetic."""

from collections.abc import Iterable

from gateway.admission.capacity import ModelCapacity
from gateway.request.queue_position import QueuePosition


def interactive_position(ahead_in_lane: int, resuming: int, other_lanes: Iterable[int]) -> int:
    """The place of a job in a high lane, ``other_lanes`` being the jobs in each of the others.

    Workers serve the resume lane first and then one lane after the other: until a job has its turn, every other lane
    has had at most as many turns as its own.
    """
    return resuming + ahead_in_lane + sum([min(waiting, ahead_in_lane) for waiting in other_lanes]) + 1


def batch_position(ahead_in_lane: int, interactive: int) -> int:
    """The place of a job in the low lane: whatever is interactive goes before it."""
    return interactive + ahead_in_lane + 1


def place_of(position: int, capacity: ModelCapacity) -> QueuePosition:
    """Put a position and the rate of service together."""
    rate = capacity.jobs_per_s
    return QueuePosition(position, None if rate is None else position / rate)
