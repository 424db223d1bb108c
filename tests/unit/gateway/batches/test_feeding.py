"""When a batch is given up, and when its lines wait."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.batches.asking import Answer
from gateway.batches.feeder import MAX_TRIES, Feeder
from gateway.batches.lines import decode_line
from gateway.batches.room import OpenLines
from gateway.batches.run import BatchRun, Stop
from gateway.batches.store import Batch, Counts
from gateway.errors import RateLimitExceeded, Refused
from gateway.settings import BatchSettings
from protocol.nats.clock import unix_now_ms
from tests.unit.gateway.admission.controls import principal

BATCH = Batch("batch_1", "openai", "t", "team", "k", "key", "/v1/completions", "file-1", "24h", 1, 2, epoch=1)
LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}'


class Run:
    """A run that records its calls."""

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
async def test_repeated_equal_failures_give_up_a_batch(failures: list[Any], called: str) -> None:
    anything: Any = None
    feeder = Feeder(anything, anything, "gw", asyncio.Event(), finished=anything)
    for failure in failures:
        feeder._note_failure(BATCH.id, ExceptionGroup("", [failure()]))
    run: Any = Run()
    await feeder._run(run)
    assert run.called == [called]


BROKEN, FULL = Refused(), RateLimitExceeded("used", retry_after_s=1)  # with 0 a line waits the default of five seconds


class Asking:
    """Answers a line with these errors in order, then with success."""

    def __init__(self, errors: list[Refused]) -> None:
        self.errors = errors
        self.asked = 0

    async def ask(self, *_: Any, **__: Any) -> Answer:
        self.asked += 1
        error = self.errors.pop(0) if self.errors else None
        return Answer("req_1", 200, b"{}", Counts(), error)


@pytest.mark.parametrize(
    ("errors", "asked", "is_answered"),
    [
        ([BROKEN], 2, True),
        ([BROKEN, BROKEN, BROKEN], 2, False),
        ([FULL, FULL, FULL], 4, True),
        ([FULL, BROKEN, FULL, BROKEN], 4, False),
    ],
)
async def test_a_line_has_limited_attempts_and_waits_for_capacity(
    errors: list[Refused], asked: int, is_answered: bool
) -> None:
    asking = Asking([*errors])
    keys = SimpleNamespace(holder_of=lambda _: principal())
    feeding: Any = SimpleNamespace(keys=keys, settings=BatchSettings(max_line_tries=2), asking=asking)
    run = BatchRun(feeding, replace(BATCH, expires_unix_ms=unix_now_ms() + 3_600_000))
    answer = await run._answer(decode_line(LINE))
    assert answer is not None
    assert (asking.asked, answer.error is None) == (asked, is_answered)


class Keys:
    """A key ring that finds a key only from the second lookup on."""

    may_be_old = True

    def __init__(self) -> None:
        self.looks = 0

    def holder_of(self, _: str) -> Any:
        self.looks += 1
        return principal() if self.looks > 1 else None


async def test_a_line_waits_while_its_key_may_be_new() -> None:
    admission: Any = SimpleNamespace(queues=())
    settings = BatchSettings()
    feeding: Any = SimpleNamespace(keys=Keys(), settings=settings, models={}, room=OpenLines(admission, settings))
    run = BatchRun(feeding, BATCH)
    results: Any = SimpleNamespace(has_room=True)
    assert await run._may_open(LINE, results)
    assert run._stop is None
    feeding.keys.holder_of = lambda _: None
    feeding.keys.may_be_old = False
    assert not await run._may_open(LINE, results)
    assert run._stop is Stop.REVOKED
