"""Shuffle sharding: the high lane of a tenant's jobs.

Each tenant has two candidate lanes, the same at all gateways. Workers share themselves fairly among the lanes, so a
tenant with a backlog slows down only those who find both of their candidates crowded.
"""

from functools import lru_cache
from hashlib import blake2b
from typing import Final

from protocol import subjects

CACHED_TENANTS: Final = 65_536


def _score(tenant: str, lane: str) -> bytes:
    return blake2b(f"{lane}\0{tenant}".encode(), digest_size=8).digest()


@lru_cache(maxsize=CACHED_TENANTS)
def candidate_lanes(tenant: str) -> tuple[str, str]:
    """The two lanes of a tenant, by rendezvous hashing: a new lane would move only the tenants that it wins."""
    first, second = sorted(subjects.HIGH_LANES, key=lambda lane: _score(tenant, lane), reverse=True)[:2]
    return first, second


def choose_lane(candidates: tuple[str, str], waiting: tuple[int, int], current: str | None) -> str:
    """The lane for a tenant's next job.

    ``waiting`` are the jobs in each candidate; ``current`` is the lane in which the tenant has jobs waiting already,
    at whichever gateway: it stays there, for a second lane would give it a second share.
    """
    if current is not None:
        return current
    return candidates[1] if waiting[1] < waiting[0] else candidates[0]
