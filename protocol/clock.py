"""The moment as messages and tables have it."""

import time


def unix_now_ms() -> int:
    """Milliseconds since 1970 in UTC, by this machine's clock."""
    return time.time_ns() // 1_000_000
