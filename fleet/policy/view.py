"""The input of a decision: the pools of one group of queues, and its waiting and expected work.

Work is counted in tokens, prompt and output together, and a worker's speed in tokens per second at full load.
"""

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct


class PlaceView(Struct, frozen=True):
    """One place of a pool."""

    name: str
    ready: int = 0
    starting: int = 0
    rests: bool = False  # it has refused a machine, or lost some, a short while ago


class PoolView(Struct, frozen=True):
    """One pool at one moment."""

    name: str
    tier: str
    usd_per_hour: float
    tokens_per_s: float  # of one worker
    start_s: float
    min_workers: int
    max_workers: int
    places: tuple[PlaceView, ...]  # best first

    @property
    def ready(self) -> int:
        """Number of workers that take jobs."""
        return sum(place.ready for place in self.places)

    @property
    def starting(self) -> int:
        """Number of machines that were wanted and do not serve yet."""
        return sum(place.starting for place in self.places)

    @property
    def size(self) -> int:
        """Number of workers once those that are starting serve."""
        return self.ready + self.starting

    @property
    def usd_per_token(self) -> float:
        """Price of a token at full load."""
        return self.usd_per_hour / 3600 / self.tokens_per_s


class BatchWork(Struct, frozen=True):
    """Batch work with a deadline."""

    due_in_s: float
    tokens: float


class Demand(Struct, frozen=True):
    """The work of one group of queues at one moment."""

    queued_tokens: float  # interactive work that waits
    tokens_per_s: float  # of interactive work, as it arrives right now
    expected: Callable[[float], float]  # seconds from now → tokens per second of interactive work
    surge: Callable[[float], float]  # share of minutes → factor over the expected rate that they stay under
    idle_s: float = 0.0  # since the last request of any kind
    is_unknown: bool = False  # no worker has ever said how the models' tokens are counted: no request can be taken
    batch: tuple[BatchWork, ...] = ()  # by deadline, soonest first
    hosted_usd_per_token: float | None = None  # of the API that takes what would wait for too long; None: there is none


class PoolPlan(Struct, frozen=True):
    """What a pool should have, and why."""

    pool: str
    size: int
    launches: Mapping[str, int]  # by place
    ends: int  # of the machines that it has, starting ones first
    reason: str


Plan = Sequence[PoolPlan]
