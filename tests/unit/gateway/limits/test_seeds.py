"""The initial amounts of a missing account."""

from typing import Any

from gateway.limits.seeds import until_ledger_is_current


class Ledger:
    """A bus with ten records, all delivered to a writer that has written a given number at each poll."""

    def __init__(self, *written: int) -> None:
        self.written = [*written]
        self.wanted: list[bytes] = []

    async def api(self, what: str) -> dict[str, Any]:
        if what.startswith("STREAM.INFO"):
            return {"state": {"first_seq": 1, "last_seq": 10}}
        floor = {"stream_seq": self.written.pop(0)}
        return {"ack_floor": floor, "delivered": {"stream_seq": 10}, "num_pending": 0, "num_ack_pending": 4}

    async def publish(self, _subject: str, payload: bytes) -> None:
        self.wanted.append(payload)


async def test_delivered_records_are_not_yet_in_the_ledger() -> None:
    ledger: Any = Ledger(6, 9, 10)
    await until_ledger_is_current(ledger)
    assert (ledger.written, ledger.wanted) == ([], [b"10"])
