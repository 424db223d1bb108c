"""The monthly cost of each machine offer for a daily load profile.

    machines = ceil(GPUs / GPUs of a machine),  GPUs = ceil(requests per second / requests per second of one GPU)
    cost     = machines x hours a day x price of a machine x days

``cost_per_1k_tokens``: 1000 / (tokens per second) x price, as in docs/explanation/fleet.md.
"""

import math
from collections.abc import Sequence

from msgspec import Struct

HOURS_PER_DAY = 24


class Phase(Struct, frozen=True):
    """A part of each day."""

    hours: float
    requests_per_s: float
    gpus: int | None = None  # None: as many as the load needs


class Offer(Struct, frozen=True):
    """A way to rent machines."""

    name: str
    usd_per_hour: float  # of one machine
    gpus: int = 1  # of one machine


class Cost(Struct, frozen=True):
    """The cost of an offer for a load."""

    offer: Offer
    machines: tuple[int, ...]  # in each phase
    usd: float
    usd_per_1k_tokens: float | None


def gpus_of(phase: Phase, requests_per_gpu_s: float) -> int:
    """Return the number of GPUs that a phase needs."""
    return math.ceil(phase.requests_per_s / requests_per_gpu_s) if phase.gpus is None else phase.gpus


def cost(
    offer: Offer,
    phases: Sequence[Phase],
    *,
    requests_per_gpu_s: float,
    days: float = 30.0,
    tokens_per_request: float | None = None,
) -> Cost:
    """Return the cost of an offer. Raises ValueError if the phases do not add up to a day."""
    if not math.isclose(sum(phase.hours for phase in phases), HOURS_PER_DAY):
        raise ValueError(f"the phases add up to {sum(phase.hours for phase in phases):g} hours instead of 24")
    machines = tuple(math.ceil(gpus_of(phase, requests_per_gpu_s) / offer.gpus) for phase in phases)
    hours = sum(count * phase.hours for count, phase in zip(machines, phases, strict=True)) * days
    usd = hours * offer.usd_per_hour
    requests = sum(phase.requests_per_s * phase.hours for phase in phases) * 3600 * days
    tokens = None if tokens_per_request is None else requests * tokens_per_request
    return Cost(offer, machines, usd, None if not tokens else usd / tokens * 1000)
