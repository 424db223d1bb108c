"""When a batch is given up, and when its lines wait."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.batches.feeder import MAX_TRIES, Feeder
from gateway.batches.room import Room
from gateway.batches.run import BatchRun, Stop
from gateway.batches.store import Batch
from gateway.settings import BatchSettings
from tests.unit.gateway.admission.controls import principal

BATCH = Batch("batch_1", "openai", "t", "team", "k", "key", "/v1/completions", "file-1", "24h", 1, 2, epoch=1)
LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}'


class Run:
    """A run whose calls are noted."""

    batch = BATCH

    def __init__(self) -> None:
        self.called: list[str] = []

    async def run(self) -> bool:
        self.called.append("run")
        return False

    async def set_aside(self, tries: int, reason: str) -> None:
        self.called.append(f"{reason} {tries}")


@pytest.mark.parametrize(
    ("failures", "called"),
    [
        ([ValueError, ValueError, KeyError, ValueError], "run"),
        ([KeyError, *[ValueError] * MAX_TRIES], f"ValueError {MAX_TRIES}"),
    ],
)
async def test_only_failures_of_one_kind_in_a_row_give_a_batch_up(failures: list[Any], called: str) -> None:
    anything: Any = None
    feeder = Feeder(anything, anything, "gw", asyncio.Event())
    for failure in failures:
        feeder._note_failure(BATCH.id, ExceptionGroup("", [failure()]))
    run: Any = Run()
    await feeder._run(run)
    assert run.called == [called]


class Keys:
    """A key ring that knows a key from the second look on."""

    may_be_old = True

    def __init__(self) -> None:
        self.looks = 0

    def holder_of(self, _: str) -> Any:
        self.looks += 1
        return principal() if self.looks > 1 else None


async def test_a_line_waits_while_its_key_may_only_not_be_known_yet() -> None:
    admission: Any = SimpleNamespace(queues=())
    settings = BatchSettings()
    feeding: Any = SimpleNamespace(keys=Keys(), settings=settings, models={}, room=Room(admission, settings))
    run = BatchRun(feeding, BATCH)
    results: Any = SimpleNamespace(has_room=True)
    assert await run._may_open(LINE, results)
    assert run._stop is None
    feeding.keys.holder_of = lambda _: None
    feeding.keys.may_be_old = False
    assert not await run._may_open(LINE, results)
    assert run._stop is Stop.REVOKED
