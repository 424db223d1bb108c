"""Chooses the tokens that the next step computes. Imports no torch.

There is one rule, and no prefill or decode phase: within a budget of tokens, each step computes the tokens that each
sequence has but has not computed. A long prompt is computed in chunks beside the others' single tokens. A resumed or
preempted sequence has more tokens to compute, and one whose prompt is cached has fewer.

    waiting ──admitted: cached blocks reused, others allocated──> running ──removed: blocks released──> gone
       ^                                                              │
       └──────────────────── preempted: blocks released ──────────────┘

Memory. A sequence gets blocks for its whole length while that costs nothing. When memory is short it gets them as it
grows, and is admitted only if every sequence could grow by `lookahead_tokens`. If they all grow further, the newest is
preempted: it releases its blocks and waits, before all others, to compute them again, except those still cached. The
oldest can always continue, because the pool can hold any single sequence.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from engine.block_pool import BlockPool, extend_keys
from engine.step_stats import SequenceClock
from engine.types import EngineCounters

NOTHING: Final = range(0)
MAX_PASSED_OVER: Final = 64  # waiting sequences that are checked to find one that need not wait for another's prompt


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice as the scheduler sees it."""

    token_ids: list[int]  # prompt and output; grows by one with each sampled token
    prompt_tokens: int  # number of prompt tokens in token_ids
    max_total_tokens: int  # prompt and max_tokens
    computed_tokens: int = 0  # number of token_ids whose keys and values are in the pool
    block_runs: list[range] = field(default_factory=list)  # its blocks, in order of its tokens; empty while waiting
    block_keys: list[bytes] = field(default_factory=list)  # of its whole blocks of tokens, computed as needed
    registered_blocks: int = 0  # number of its first blocks that are registered in the cache
    draft: list[int] = field(default_factory=list)  # draft tokens after token_ids, for the next step only
    adapter: str | None = None  # the adapter that computes its tokens
    cache_salt: str = ""  # only sequences of the same salt share its cached blocks
    cached_tokens: int | None = None  # prompt tokens found in the cache at the first admission; None before it
    scored_tokens: int | None = None  # number of known prompt logprobs; None: not requested
    clock: SequenceClock = field(default_factory=SequenceClock)

    @property
    def output_tokens(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """Number of tokens still to be computed."""
        return len(self.token_ids) - self.computed_tokens

    @property
    def is_unscored(self) -> bool:
        """True while logprobs of its prompt are requested and not all known."""
        return self.scored_tokens is not None and self.scored_tokens < self.prompt_tokens

    def unscored(self, tokens: int) -> range:
        """Return those of the next `tokens` positions whose logits are needed for a requested prompt logprob."""
        if self.scored_tokens is None:
            return NOTHING
        first = max(self.computed_tokens, self.scored_tokens - 1)
        return range(first, max(first, min(self.computed_tokens + tokens, self.prompt_tokens - 1)))

    @property
    def held_blocks(self) -> int:
        """Number of blocks it holds."""
        return sum(map(len, self.block_runs))

    def block_at(self, number: int) -> int:
        """Return its block `number`, counted from its first token."""
        for run in self.block_runs:
            if number < len(run):
                return run[number]
            number -= len(run)
        raise IndexError(number)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute the next `tokens` tokens of `sequence`, and after them `draft_tokens` of its draft."""

    sequence: Sequence
    tokens: int
    draft_tokens: int = 0

    @property
    def samples(self) -> bool:
        """True if the chunk catches up, so that its last row yields the next token."""
        return self.tokens == self.sequence.pending_tokens

    @property
    def unscored(self) -> range:
        """The chunk's positions whose logits are needed for prompt logprobs."""
        return self.sequence.unscored(self.tokens)


class Scheduler:
    """First come, first served; at most `max_sequences` run and `max_batched_tokens` are computed in one step.

    Of these, at most `max_scored_tokens` are prompt tokens whose logits are needed.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        *,
        max_sequences: int,
        max_batched_tokens: int,
        lookahead_tokens: int,
        max_scored_tokens: int = 1,
        prefix_cache: bool = True,
    ) -> None:
        self.block_pool = block_pool
        self.max_sequences = max_sequences
        self.max_batched_tokens = max_batched_tokens
        self.max_scored_tokens = max_scored_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # longest admitted first
        self.counters = EngineCounters()
        self._lookahead_tokens = lookahead_tokens
        self._prefix_cache = prefix_cache
        self._pending_keys: dict[
            bytes, int
        ] = {}  # keys of blocks that running sequences will compute, with their number

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; the caller ensures that the pool could hold it."""
        sequence.clock.added_s = time.monotonic()
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Remove a waiting or running sequence and release its blocks; with `forget`, drop their contents as well."""
        if sequence.block_runs:
            self.running.remove(sequence)
            if forget:
                self.block_pool.forget(sequence.block_runs)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> list[Chunk]:
        """Choose the next step's chunks, oldest sequence first.

        A chunk that does not catch up takes the rest of the budget, so at most one sequence, the newest, is in the
        middle of its prompt, and a long prompt cannot stall the older streams. (Sequences whose prompt is scored take
        at most the budget for logits; the others continue beside them.)
        """
        budget, scored_budget = self.max_batched_tokens, self.max_scored_tokens
        chunks: list[Chunk] = []
        preemptions = self.counters.preemptions
        number = 0
        while budget > 0 and number < len(self.running):  # sequences are preempted from the end
            sequence = self.running[number]
            tokens = _affordable(sequence, budget, scored_budget)
            number += 1
            if tokens and self._ensure_blocks(sequence, sequence.computed_tokens + tokens):
                draft_tokens = 0
                if sequence.draft and tokens == sequence.pending_tokens:
                    spare = budget - tokens - (len(self.running) - number)  # reserve one token for each sequence
                    draft_tokens = self._allocate_draft(sequence, spare)
                chunks.append(Chunk(sequence, tokens, draft_tokens))
                budget -= tokens + draft_tokens
                scored_budget -= len(chunks[-1].unscored)
        while budget > 0 and preemptions == self.counters.preemptions and (admitted := self._admit_next()):
            if tokens := _affordable(admitted, budget, scored_budget):
                chunks.append(Chunk(admitted, tokens))
                budget -= tokens
                scored_budget -= len(chunks[-1].unscored)
        return chunks

    def computed(self, chunk: Chunk) -> None:
        """Record that a chunk's keys and values are in the pool, and register its full blocks in the prefix cache."""
        sequence = chunk.sequence
        sequence.computed_tokens += chunk.tokens
        self.counters.computed_tokens += chunk.tokens
        if not self._prefix_cache:
            return
        whole_blocks = sequence.computed_tokens // self.block_pool.block_size
        if whole_blocks > sequence.registered_blocks:
            self._drop_pending_keys(sequence.block_keys[sequence.registered_blocks : whole_blocks])
            self._extend_keys(sequence)
            for number in range(sequence.registered_blocks, whole_blocks):
                self.block_pool.register(sequence.block_at(number), sequence.block_keys[number])
            sequence.registered_blocks = whole_blocks

    def _extend_keys(self, sequence: Sequence) -> None:
        block_size = self.block_pool.block_size
        extend_keys(sequence.block_keys, sequence.token_ids, block_size, sequence.adapter, sequence.cache_salt)

    # --- memory -------------------------------------------------------------------------------------------------------

    def _ensure_blocks(self, sequence: Sequence, tokens: int) -> bool:
        """Ensure that a running sequence has blocks for `tokens` tokens; False if it was preempted itself."""
        missing = self.block_pool.blocks_for(tokens) - sequence.held_blocks
        while missing > self.block_pool.free_blocks:
            if self._reclaim():
                continue
            newest = self.running[-1]
            self._preempt(newest)
            if newest is sequence:
                return False
        if missing > 0:
            self._allocate(sequence, missing)
        return True

    def _allocate_draft(self, sequence: Sequence, spare_tokens: int) -> int:
        """Allocate blocks for its draft and return how many draft tokens fit; never preempts a sequence for a draft."""
        tokens = max(0, min(len(sequence.draft), spare_tokens))
        missing = self.block_pool.blocks_for(len(sequence.token_ids) + tokens) - sequence.held_blocks
        if missing > self.block_pool.free_blocks - len(self.running):
            return 0
        if missing > 0:
            self._allocate(sequence, missing)
        return tokens

    def _allocate(self, sequence: Sequence, blocks: int) -> None:
        runs = sequence.block_runs
        for run in self.block_pool.allocate(blocks, after=runs[-1][-1] if runs else None):
            _append(runs, run)

    def _reclaim(self) -> bool:
        """Release blocks that running sequences do not need yet; False if there are none."""
        has_reclaimed = False
        for sequence in self.running:
            kept_tokens = len(sequence.token_ids) + len(sequence.draft)
            surplus = sequence.held_blocks - self.block_pool.blocks_for(kept_tokens)
            while surplus > 0:
                run = sequence.block_runs.pop()
                kept, dropped = run[: max(0, len(run) - surplus)], run[max(0, len(run) - surplus) :]
                if kept:
                    sequence.block_runs.append(kept)
                self.block_pool.release([dropped])
                surplus -= len(dropped)
                has_reclaimed = True
        return has_reclaimed

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.counters.preemptions += 1
        sequence.clock.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._drop_pending_keys(sequence.block_keys[sequence.registered_blocks :])
        self.block_pool.release(sequence.block_runs)
        sequence.block_runs = []
        sequence.computed_tokens = sequence.registered_blocks = 0

    # --- admission ----------------------------------------------------------------------------------------------------

    def _admit_next(self) -> Sequence | None:
        """Admit the first waiting sequence, skipping those whose next blocks a running one is about to compute."""
        if len(self.running) >= self.max_sequences:
            return None
        for number, sequence in enumerate(self.waiting):
            if number == MAX_PASSED_OVER:
                return None
            findable = self._cacheable_keys(sequence)
            blocks = self.block_pool.match(findable)
            if len(blocks) < len(findable) and findable[len(blocks)] in self._pending_keys:
                continue
            self.block_pool.retain(blocks)
            if not self._fits(sequence, len(blocks)):
                self.block_pool.release(_runs_of(blocks))
                return None
            del self.waiting[number]
            self._admit(sequence, blocks)
            return sequence
        return None

    def _cacheable_keys(self, sequence: Sequence) -> list[bytes]:
        """Return the keys of its blocks, except the last token's: at least one token must be computed for logits."""
        if self._prefix_cache:
            self._extend_keys(sequence)
        # Logits are not cached: tokens that need them must be computed.
        needless = (sequence.scored_tokens or 1) if sequence.is_unscored else len(sequence.token_ids)
        return sequence.block_keys[: (needless - 1) // self.block_pool.block_size]

    def _fits(self, sequence: Sequence, found_blocks: int) -> bool:
        """Report whether it and all running sequences could grow by `lookahead_tokens`, after reclaiming blocks."""
        promised = sum(self._required_blocks(other) - other.held_blocks for other in self.running)
        return self._required_blocks(sequence) - found_blocks <= self.block_pool.free_blocks - promised

    def _required_blocks(self, sequence: Sequence) -> int:
        ahead = max(self._lookahead_tokens, len(sequence.draft))  # blocks held for its draft cannot be reclaimed
        tokens = min(sequence.max_total_tokens, len(sequence.token_ids) + ahead)
        return self.block_pool.blocks_for(tokens)

    def _admit(self, sequence: Sequence, found_blocks: list[int]) -> None:
        sequence.block_runs = _runs_of(found_blocks)
        sequence.computed_tokens = len(found_blocks) * self.block_pool.block_size
        sequence.registered_blocks = len(found_blocks)
        if sequence.cached_tokens is None:
            sequence.clock.scheduled_s = time.monotonic()
            sequence.cached_tokens = min(sequence.computed_tokens, sequence.prompt_tokens)
            self.counters.prompt_tokens += sequence.prompt_tokens
            self.counters.queried_tokens += sequence.prompt_tokens if self._prefix_cache else 0
            self.counters.cached_tokens += sequence.cached_tokens
        for key in sequence.block_keys[len(found_blocks) :]:
            self._pending_keys[key] = self._pending_keys.get(key, 0) + 1
        missing = self.block_pool.blocks_for(sequence.max_total_tokens) - len(found_blocks)
        if missing > self.block_pool.blank_blocks:
            missing = self._required_blocks(sequence) - len(found_blocks)
            while missing > self.block_pool.free_blocks and self._reclaim():
                pass
        self._allocate(sequence, missing)
        self.running.append(sequence)

    def _drop_pending_keys(self, keys: list[bytes]) -> None:
        for key in keys:
            self._pending_keys[key] -= 1
            if not self._pending_keys[key]:
                del self._pending_keys[key]


def _affordable(sequence: Sequence, budget: int, scored_budget: int) -> int:
    """Return how many of its next tokens fit into the budgets."""
    tokens = min(sequence.pending_tokens, budget)
    unscored = sequence.unscored(tokens)
    return tokens if len(unscored) <= scored_budget else unscored[scored_budget] - sequence.computed_tokens


def _runs_of(blocks: list[int]) -> list[range]:
    """Join consecutive blocks into runs."""
    runs: list[range] = []
    for block in blocks:
        _append(runs, range(block, block + 1))
    return runs


def _append(runs: list[range], run: range) -> None:
    if runs and runs[-1].stop == run.start:
        runs[-1] = range(runs[-1].start, run.stop)
    else:
        runs.append(run)
