"""free + used = total and no block has two owners by accident, whatever is asked of the pool and the scheduler."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from engine.errors import EngineCorrupted
from engine.scheduler import Chunk, Scheduler, Sequence

BLOCKS = 24


@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 30)), max_size=60))
def test_blocks_are_never_lost_or_given_twice(operations: list[tuple[str, int]]) -> None:
    pool = BlockPool(BLOCKS, block_size=4)
    owners: list[list[range]] = []
    for name, number in operations:
        if name == "allocate" and 0 < number <= pool.free_blocks:
            owners.append(pool.allocate(number))
            assert sum(map(len, owners[-1])) == number
        elif name == "retain" and owners:
            owners.append(owners[number % len(owners)])
            pool.retain(owners[-1])
        elif name == "release" and owners:
            pool.release(owners.pop(number % len(owners)))
        pool.check()
        used = {block for runs in owners for run in runs for block in run}
        assert pool.used_blocks == len(used)
        assert pool.free_blocks + pool.used_blocks == BLOCKS
    for runs in owners:
        pool.release(runs)
    assert pool.allocate(BLOCKS) == [range(BLOCKS)], "free blocks did not grow together again"


def test_a_fitting_run_is_preferred_to_pieces() -> None:
    pool = BlockPool(10, block_size=4)
    small, keep, _ = pool.allocate(2), pool.allocate(1), pool.allocate(3)
    pool.release(small)
    assert pool.allocate(4) == [range(6, 10)]
    assert pool.allocate(2) == [range(2)]
    pool.release(keep)
    with pytest.raises(ValueError, match="1 free"):
        pool.allocate(2)


def test_double_release_and_retaining_free_blocks_are_caught() -> None:
    pool = BlockPool(4, block_size=4)
    runs = pool.allocate(1)
    pool.release(runs)
    with pytest.raises(EngineCorrupted):
        pool.release(runs)
    with pytest.raises(EngineCorrupted):
        pool.retain(runs)


class Simulation:
    """A scheduler, and an engine that computes nothing."""

    def __init__(self, max_sequences: int, max_batched_tokens: int) -> None:
        self.pool = BlockPool(BLOCKS, block_size=4)
        self.scheduler = Scheduler(self.pool, max_sequences=max_sequences, max_batched_tokens=max_batched_tokens)
        self.live: list[Sequence] = []

    def add(self, prompt: int, output: int) -> None:
        self.live.append(Sequence([5] * prompt, prompt_tokens=prompt, max_total_tokens=prompt + output))
        self.scheduler.add(self.live[-1])

    def abort(self, number: int) -> None:
        if self.live:
            self.scheduler.remove(self.live.pop(number % len(self.live)))
        self.check_blocks()

    def step(self) -> None:
        streaming = [sequence for sequence in self.scheduler.running if sequence.pending_tokens == 1]
        chunks = self.scheduler.schedule()
        self.check_plan(chunks, streaming)
        for chunk in chunks:
            samples = chunk.samples
            chunk.sequence.computed_tokens += chunk.tokens
            if samples:
                chunk.sequence.token_ids.append(7)
            if len(chunk.sequence.token_ids) == chunk.sequence.max_total_tokens:
                self.scheduler.remove(chunk.sequence)
                self.live.remove(chunk.sequence)
        self.check_blocks()

    def check_plan(self, chunks: list[Chunk], streaming: list[Sequence]) -> None:
        assert sum(chunk.tokens for chunk in chunks) <= self.scheduler.max_batched_tokens
        assert len(self.scheduler.running) <= self.scheduler.max_sequences
        assert chunks or not self.live, "nobody advances though somebody waits"
        advancing = [chunk.sequence for chunk in chunks]
        assert all(sequence in advancing for sequence in streaming), "a long prompt stalls a stream"
        for chunk in chunks:
            assert 1 <= chunk.tokens <= chunk.sequence.pending_tokens
            assert chunk.sequence.computed_tokens + chunk.tokens <= 4 * sum(map(len, chunk.sequence.block_runs))

    def check_blocks(self) -> None:
        self.pool.check()
        owned = [block for sequence in self.scheduler.running for run in sequence.block_runs for block in run]
        assert len(owned) == len(set(owned)) == self.pool.used_blocks
        assert not any(sequence.block_runs for sequence in self.scheduler.waiting)


requests = st.tuples(st.just("add"), st.integers(1, 40), st.integers(1, 20))  # prompt and output tokens
aborts = st.tuples(st.just("abort"), st.integers(0, 50))


@settings(deadline=None)
@given(st.lists(st.one_of(requests, aborts, st.just(("step",))), max_size=80), st.integers(1, 5), st.integers(5, 16))
def test_scheduler_serves_everyone_within_its_budgets(
    events: list[tuple[Any, ...]], max_sequences: int, max_batched_tokens: int
) -> None:
    simulation = Simulation(max_sequences, max_batched_tokens)
    for name, *numbers in events:
        getattr(simulation, name)(*numbers)
    steps_left = sum(sequence.max_total_tokens for sequence in simulation.live)  # each step computes a token
    while simulation.live:
        assert steps_left > 0
        simulation.step()
        steps_left -= 1
    assert simulation.pool.free_blocks == BLOCKS


def test_bookkeeping_needs_no_torch() -> None:
    code = "import sys, engine, engine.scheduler, engine.block_pool, engine.types; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
