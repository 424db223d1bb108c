"""Queue positions."""

from msgspec import Struct


class QueuePosition(Struct, frozen=True):
    """Position of a job among all that wait for its model."""

    position: int  # from 1
    eta_s: float | None  # until a worker takes it; None: unknown
