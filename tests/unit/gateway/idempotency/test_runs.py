"""How long answers are kept, and which are dropped."""

import asyncio
from typing import Any

from gateway.idempotency.runs import Run, Runs
from gateway.idempotency.sharing import claim_state_of, part_of
from gateway.settings import IdempotencySettings
from protocol.gateways import MAX_PART_BYTES, ClaimState
from tests.waiting import HANGS_S

LONG = {"reattach_s": 60, "keep_s": 60}


def runs_with(released: list[int] | None = None, **settings: Any) -> Runs:
    gone = [] if released is None else released
    return Runs(IdempotencySettings.model_validate({**LONG, **settings}), gone.append)


async def start(run: Run, status: int = 200) -> None:
    run.recording.start(status, [(b"a", b"b")])


async def write(run: Run, body: bytes, more: bool = True) -> None:
    run.recording.write(body, more=more)


async def answer(runs: Runs, name: str, body: bytes = b"x", status: int = 200) -> Run:
    run = runs.begin(name, "print", len(runs) + 1)
    await start(run, status)
    await write(run, body, more=False)
    runs.ended(run)
    return run


async def test_a_successful_answer_is_kept_for_keep_s() -> None:
    released: list[int] = []
    runs = runs_with(released, keep_s=0.02)
    run = await answer(runs, "k")
    assert runs.find("k") is run
    assert claim_state_of(run, "print") is ClaimState.REPLAYED
    assert claim_state_of(run, "other") is ClaimState.REUSED
    async with asyncio.timeout(HANGS_S):
        while runs.find("k"):
            await asyncio.sleep(0.005)
    assert released == [1]


async def test_errors_and_incomplete_answers_release_the_key() -> None:
    released: list[int] = []
    runs = runs_with(released)
    await answer(runs, "refused", status=503)
    half = runs.begin("half", "print", 2)
    await start(half)
    await write(half, b"x")
    runs.ended(half)
    assert len(runs) == 0
    assert released == [1, 2]
    part = await part_of(half, ClaimState.ATTACHED, 0)
    assert (part.body, part.ended, part.complete) == (b"x", True, False)


async def test_a_run_without_readers_is_cancelled() -> None:
    runs = runs_with(reattach_s=0.01)
    run = runs.begin("k", "print", None)
    with run.reading():
        await asyncio.sleep(0.05)
        assert not run.abandoned.is_set()
    async with asyncio.timeout(HANGS_S):
        await run.abandoned.wait()
    assert runs.find("k") is None


async def test_the_oldest_answers_are_dropped_first() -> None:
    runs = runs_with(max_bytes=100)
    for name in "abc":
        await answer(runs, name, b"x" * 40)
    assert [run.name for run in runs] == ["b", "c"]
    runs = runs_with(max_runs=2)
    for name in "abc":
        await answer(runs, name)
    assert [run.name for run in runs] == ["b", "c"]


async def test_a_running_answer_can_outgrow_the_memory() -> None:
    """Readers that keep up continue; new readers cannot start."""
    runs = runs_with(max_bytes=100)
    await answer(runs, "old", b"x" * 40)
    run = runs.begin("k", "print", None)
    await start(run)
    for number in range(5):
        await write(run, b"%d" % number * 40)
    assert [kept.name for kept in runs] == ["k"]
    assert run.recording.kept_bytes == 100
    assert (await part_of(run, ClaimState.ATTACHED, 0)).standing is ClaimState.NOT_KEPT
    assert (await part_of(run, ClaimState.ATTACHED, 160)).body == b"4" * 40
    await write(run, b"", more=False)
    runs.ended(run)
    assert len(runs) == 0
    await answer(runs, "next", b"x" * 100)  # all memory is free again
    assert len(runs) == 1


async def test_parts() -> None:
    runs = runs_with()
    run = runs.begin("k", "print", None)
    nothing = await part_of(run, ClaimState.ATTACHED, 0, wait_s=0.01)
    assert (nothing.status, nothing.body, nothing.ended) == (0, b"", False)
    waiting = asyncio.create_task(part_of(run, ClaimState.ATTACHED, 0))
    await asyncio.sleep(0)
    await start(run)
    await write(run, b"x" * (MAX_PART_BYTES + 1), more=False)
    runs.ended(run)
    first = await waiting
    assert (first.status, first.headers) == (200, ((b"a", b"b"),))
    assert (len(first.body), first.ended) == (MAX_PART_BYTES, False)
    last = await part_of(run, ClaimState.REPLAYED, MAX_PART_BYTES)
    assert (last.body, last.ended, last.complete) == (b"x", True, True)
