"""Settings of requests that carry an ``Idempotency-Key``."""

from protocol.settings import PositiveInt, PositiveSeconds, Settings


class IdempotencySettings(Settings):
    """Requests that carry an ``Idempotency-Key``."""

    reattach_s: PositiveSeconds = 30.0  # how long one continues without a reader
    keep_s: PositiveSeconds = 600.0  # how long its answer can be replayed
    max_runs: PositiveInt = 10_000  # running and kept; past a bound, the oldest kept answers go
    max_bytes: PositiveInt = 256 * 1024 * 1024  # of their answers
