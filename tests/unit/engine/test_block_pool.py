"""No block is lost, allocated twice or found under a wrong key, whatever the requests."""

import random
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool, extend_keys
from engine.errors import EngineCorrupted
from engine.scheduler import Chunk, Scheduler, Sequence
from tests.unit.engine.invariants import check_scheduler

BLOCKS = 24
BLOCK_SIZE = 4

operations = st.tuples(
    st.sampled_from(["allocate", "retain", "release", "register", "find", "forget"]), st.integers(0, 30)
)


@given(st.lists(operations, max_size=80))
def test_blocks_are_never_lost_or_given_twice(events: list[tuple[str, int]]) -> None:
    pool = BlockPool(BLOCKS, BLOCK_SIZE)
    owners: list[list[range]] = []
    for name, number in events:
        if name == "allocate" and 0 < number <= pool.free_blocks:
            owners.append(pool.allocate(number))
            assert sum(map(len, owners[-1])) == number
        elif name == "find":
            found = pool.match([b"%d" % number])
            pool.retain(found)
            owners.append([range(block, block + 1) for block in found])
        elif owners:
            runs = owners[number % len(owners)]
            blocks = [block for run in runs for block in run]
            if name == "retain":
                owners.append(runs)
                pool.retain(blocks)
            elif name == "register" and blocks:
                pool.register(blocks[0], b"%d" % (number % 5))
            elif name == "forget":
                pool.forget(runs)
                assert not any(set(pool.match([b"%d" % key])) & set(blocks) for key in range(5))
            elif name == "release":
                pool.release(owners.pop(number % len(owners)))
        pool.check()
        used = {block for runs in owners for run in runs for block in run}
        assert pool.used_blocks == len(used)
        assert pool.free_blocks + pool.used_blocks == BLOCKS
    for runs in owners:
        pool.release(runs)
    assert pool.allocate(BLOCKS) == [range(BLOCKS)], "free blocks did not grow together again"


def test_a_fitting_run_is_preferred_to_pieces() -> None:
    pool = BlockPool(10, BLOCK_SIZE)
    small, keep, _ = pool.allocate(2), pool.allocate(1), pool.allocate(3)
    pool.release(small)
    assert pool.allocate(4) == [range(6, 10)]
    assert pool.allocate(2) == [range(2)]
    pool.release(keep)
    with pytest.raises(ValueError, match="1 free"):
        pool.allocate(2)


def test_a_sequence_grows_in_place_if_possible() -> None:
    pool = BlockPool(10, BLOCK_SIZE)
    first, second = pool.allocate(3), pool.allocate(3)
    assert pool.allocate(2, after=second[-1][-1]) == [range(6, 8)]
    assert pool.allocate(1, after=first[-1][-1]) == [range(8, 9)], "what follows is another's"
    assert pool.allocate(1, after=9) == [range(9, 10)], "nothing follows the last block"


def test_cached_blocks_are_evicted_least_recently_used_first() -> None:
    pool = BlockPool(6, BLOCK_SIZE)
    old, new = pool.allocate(2), pool.allocate(2)
    for block, key in zip([0, 1, 2, 3], [b"a", b"b", b"c", b"d"], strict=True):
        pool.register(block, key)
    pool.release(old)
    pool.release(new)
    assert (pool.free_blocks, pool.blank_blocks) == (6, 2)
    assert pool.match([b"a", b"b", b"x"]) == [0, 1]
    pool.allocate(3)
    assert pool.match([b"a", b"b"]) == [0], "the end of a chain goes before its beginning"
    pool.retain(pool.match([b"a"]))
    pool.allocate(2)
    assert pool.match([b"a"]) == [0]
    assert pool.match([b"c"]) == [], "what is used does not go"


def test_of_two_blocks_with_the_same_tokens_one_is_found() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    pool.allocate(2)
    pool.register(0, b"a")
    pool.register(1, b"a")
    pool.release([range(2)])
    assert pool.match([b"a"]) == [0]
    assert pool.blank_blocks == 1


def test_misuse_is_caught() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    runs = pool.allocate(1)
    pool.release(runs)
    with pytest.raises(EngineCorrupted):
        pool.release(runs)
    with pytest.raises(EngineCorrupted):
        pool.retain([0])
    with pytest.raises(EngineCorrupted):
        pool.register(0, b"a")


def test_a_key_depends_on_every_token_up_to_the_end_of_its_block() -> None:
    def keys_of(*token_ids: int) -> list[bytes]:
        keys: list[bytes] = []
        extend_keys(keys, token_ids, 2)
        return keys

    assert len(keys_of(1, 2, 3)) == 1
    assert keys_of(1, 2, 3, 4)[0] == keys_of(1, 2)[0]
    assert len({keys_of(1, 2, 3, 4)[1], keys_of(9, 2, 3, 4)[1], keys_of(1, 2, 3, 9)[1], keys_of(3, 4)[0]}) == 4
    grown = keys_of(1, 2)
    extend_keys(grown, [1, 2, 3, 4, 5], 2)
    assert grown == keys_of(1, 2, 3, 4)


def test_a_key_depends_on_the_adapter_and_the_salt() -> None:
    def keys_of(adapter: str | None, cache_salt: str) -> tuple[bytes, ...]:
        keys: list[bytes] = []
        extend_keys(keys, [1, 2, 3, 4], 2, adapter, cache_salt)
        return tuple(keys)

    roots = [(None, ""), ("a", ""), (None, "a"), ("a", "b"), ("b", "a"), ("ab", ""), ("a, ", "b"), (None, "', 'a")]
    found = [keys_of(*root) for root in roots]
    assert found == [keys_of(*root) for root in roots]
    assert len({key for keys in found for key in keys}) == 2 * len(roots), "no two have a block in common"


class Simulation:
    """A scheduler, and an engine whose keys and values are the tokens that they depend on."""

    def __init__(
        self,
        max_sequences: int,
        max_batched_tokens: int,
        *,
        lookahead_tokens: int = 64,
        prefix_cache: bool = True,
        guesses: tuple[int, int] = (0, 0),
    ) -> None:
        """`guesses` gives the numbers of right and wrong tokens of each draft."""
        self.pool = BlockPool(BLOCKS, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.pool,
            max_sequences=max_sequences,
            max_batched_tokens=max_batched_tokens,
            lookahead_tokens=lookahead_tokens,
            prefix_cache=prefix_cache,
        )
        self.live: list[Sequence] = []
        self.content: dict[int, tuple[int, ...]] = {}  # by slot
        self.computed = 0
        self.guesses = guesses
        self.aborted = 0
        self.passed_over: Counter[int] = Counter()  # by sequence: steps in which a later one was admitted before it

    def add(self, prompt: int, output: int, token: int) -> None:
        """Add a prompt; half of all prompts share a prefix."""
        token_ids = [7] * (prompt // 2) + [token] * (prompt - prompt // 2)
        self.live.append(Sequence(token_ids, prompt_tokens=prompt, max_total_tokens=prompt + output))
        self.scheduler.add(self.live[-1])

    def abort(self, number: int) -> None:
        if self.live:
            self.scheduler.remove(self.live.pop(number % len(self.live)))
            self.aborted += 1
        check_scheduler(self.scheduler)

    def step(self) -> None:
        streaming = [sequence for sequence in self.scheduler.running if sequence.pending_tokens == 1]
        for sequence in self.scheduler.running:
            self.guess(sequence)
        waiting = list(self.scheduler.waiting)
        chunks = self.scheduler.schedule()
        self.check_plan(chunks, streaming)
        self.check_fairness(waiting)
        for chunk in chunks:
            self.compute(chunk)
        for chunk in chunks:
            samples = chunk.samples
            self.scheduler.computed(chunk)
            if samples:
                chunk.sequence.token_ids.append(7)
            for _ in range(min(chunk.draft_tokens, self.guesses[0])):
                self.scheduler.computed(Chunk(chunk.sequence, 1))
                chunk.sequence.token_ids.append(7)
            chunk.sequence.draft = []
            if len(chunk.sequence.token_ids) == chunk.sequence.max_total_tokens:
                self.scheduler.remove(chunk.sequence)
                self.live.remove(chunk.sequence)
        check_scheduler(self.scheduler)

    def guess(self, sequence: Sequence) -> None:
        right, wrong = self.guesses
        room = sequence.max_total_tokens - len(sequence.token_ids) - 1
        sequence.draft = ([7] * right + [8] * wrong)[:room] if sequence.pending_tokens == 1 else []

    def compute(self, chunk: Chunk) -> None:
        """Check that each token finds the keys and values of all tokens before it, and store its own."""
        sequence = chunk.sequence
        for position in range(sequence.computed_tokens + chunk.tokens + chunk.draft_tokens):
            slot = sequence.block_at(position // BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE
            own = tuple([*sequence.token_ids, *sequence.draft][: position + 1])
            if position >= sequence.computed_tokens:
                self.content[slot] = own
                self.computed += 1
            assert self.content[slot] == own, "the keys and values of other tokens"

    def check_plan(self, chunks: list[Chunk], streaming: list[Sequence]) -> None:
        scheduler = self.scheduler
        assert sum(chunk.tokens + chunk.draft_tokens for chunk in chunks) <= scheduler.max_batched_tokens
        assert chunks or not self.live, "no sequence advances although some wait"
        advancing = [chunk.sequence for chunk in chunks]
        stalled = [s for s in streaming if s in scheduler.running and s not in advancing]
        assert not stalled, "a long prompt stalls a stream"
        for chunk in chunks:
            assert chunk.sequence in scheduler.running
            assert 1 <= chunk.tokens <= chunk.sequence.pending_tokens
            last = chunk.sequence.computed_tokens + chunk.tokens + chunk.draft_tokens
            assert last <= BLOCK_SIZE * chunk.sequence.held_blocks

    def check_fairness(self, waiting: list[Sequence]) -> None:
        """A skipped sequence waits for blocks that another computes, a token or more per step, until that is lost."""
        admitted = [number for number, sequence in enumerate(waiting) if sequence in self.scheduler.running]
        for sequence in waiting[: max(admitted, default=0)]:
            if sequence not in self.scheduler.running:
                self.passed_over[id(sequence)] += 1
                lost = self.scheduler.counters.preemptions + self.aborted
                assert self.passed_over[id(sequence)] <= len(sequence.token_ids) * (1 + lost), "it starves"

    def finish(self) -> None:
        steps_left = 20 * sum(sequence.max_total_tokens for sequence in self.live)
        while self.live:
            assert steps_left > 0, "it does not come to an end"
            self.step()
            steps_left -= 1
        assert self.pool.free_blocks == BLOCKS
        assert not self.scheduler._pending_keys


requests = st.tuples(st.just("add"), st.integers(1, 40), st.integers(1, 50), st.integers(1, 3))
aborts = st.tuples(st.just("abort"), st.integers(0, 50))
events_of_a_day = st.lists(st.one_of(requests, aborts, st.just(("step",))), max_size=80)


@given(
    events_of_a_day,
    st.integers(1, 5),
    st.integers(5, 16),
    st.integers(0, 60),
    st.booleans(),
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_the_scheduler_serves_all_within_its_budgets(
    events: list[tuple[Any, ...]],
    max_sequences: int,
    max_batched_tokens: int,
    lookahead_tokens: int,
    prefix_cache: bool,
    guesses: tuple[int, int],
) -> None:
    simulation = Simulation(
        max_sequences,
        max_batched_tokens,
        lookahead_tokens=lookahead_tokens,
        prefix_cache=prefix_cache,
        guesses=guesses,
    )
    for name, *numbers in events:
        getattr(simulation, name)(*numbers)
    simulation.finish()


@pytest.mark.parametrize("seed", range(10))
def test_the_scheduler_serves_all_in_a_storm(seed: int) -> None:
    """Longer than a search for a minimal failure allows: memory is short most of the time."""
    source = random.Random(seed)
    lookahead_tokens = source.choice([0, 3, 20])
    batched_tokens, guesses = source.randint(6, 16), (source.randint(0, 5), source.randint(1, 5))
    simulation = Simulation(6, batched_tokens, lookahead_tokens=lookahead_tokens, guesses=guesses)
    for _ in range(200):
        event = source.random()
        if event < 0.35:
            simulation.add(source.randint(1, 40), source.randint(1, 50), source.randint(1, 3))
        elif event < 0.4:
            simulation.abort(source.randint(0, 50))
        else:
            simulation.step()
    simulation.finish()
    assert simulation.scheduler.counters.preemptions > 0


def test_a_prompt_in_progress_is_computed_once() -> None:
    simulation = Simulation(max_sequences=8, max_batched_tokens=8)
    for _ in range(4):
        simulation.add(prompt=22, output=1, token=7)
    simulation.finish()
    assert simulation.computed == 22 + 3 * 2, "all but the last block is found"


def test_without_the_cache_every_prompt_is_computed() -> None:
    simulation = Simulation(max_sequences=8, max_batched_tokens=8, prefix_cache=False)
    for _ in range(4):
        simulation.add(prompt=22, output=1, token=7)
    simulation.finish()
    assert simulation.computed == 4 * 22


def test_a_sequence_waiting_for_anothers_prompt_delays_no_other() -> None:
    simulation = Simulation(max_sequences=8, max_batched_tokens=32)
    for prompt, token in ((20, 7), (20, 7), (2, 1)):
        simulation.add(prompt, output=1, token=token)
    second = simulation.live[1]
    simulation.step()
    assert simulation.live == [second], "the third has overtaken it"
    simulation.finish()


def test_the_newest_is_preempted_and_resumes_first() -> None:
    simulation = Simulation(max_sequences=8, max_batched_tokens=8, lookahead_tokens=0)  # computed again in chunks
    for token in (1, 2, 3):
        simulation.add(prompt=20, output=44, token=token)
    first, second, third = simulation.live
    while not simulation.scheduler.counters.preemptions:
        simulation.step()
    assert simulation.scheduler.running == [first, second]
    simulation.add(prompt=4, output=4, token=4)
    assert list(simulation.scheduler.waiting) == [third, simulation.live[-1]]
    simulation.finish()


def test_bookkeeping_needs_no_torch() -> None:
    code = "import sys, engine, engine.scheduler, engine.block_pool, engine.types; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
