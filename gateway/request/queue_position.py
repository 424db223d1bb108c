"""Where a waiting request stands."""

from msgspec import Struct


class QueuePosition(Struct, frozen=True):
    """A job's place among all that wait for its model."""

    position: int  # from 1
    eta_s: float | None  # until a worker takes it; None: unknown
