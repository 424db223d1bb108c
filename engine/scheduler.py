"""Which tokens the next step computes. Imports no torch.

One rule, and no prefill or decode phase: each step lets every sequence's computed tokens catch up with the tokens it
has, inside a budget of tokens. A long prompt is computed in chunks beside the others' single tokens; a resumed
sequence is one with more tokens to catch up on.

    waiting ──admitted: blocks reserved for its whole length──> running ──removed: blocks released──> gone

Admission reserves the blocks for prompt and max_tokens together, so a running sequence can never be short of memory
and nothing has to be preempted.
"""

from collections import deque
from dataclasses import dataclass, field

from engine.block_pool import BlockPool


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice as the scheduler sees it."""

    token_ids: list[int]  # prompt and output; grows by one with each sampled token
    prompt_tokens: int  # how many of token_ids are the prompt
    max_total_tokens: int  # prompt and max_tokens: what is reserved
    computed_tokens: int = 0  # how many of token_ids have their keys and values in the pool
    block_runs: list[range] = field(default_factory=list)  # its blocks, in order of its tokens; empty while waiting

    @property
    def output_tokens(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """Tokens still to be computed."""
        return len(self.token_ids) - self.computed_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute the next `tokens` tokens of `sequence`."""

    sequence: Sequence
    tokens: int

    @property
    def samples(self) -> bool:
        """Whether the chunk catches up, so that its last row yields the next token."""
        return self.tokens == self.sequence.pending_tokens


class Scheduler:
    """First come, first served; at most `max_sequences` run and `max_batched_tokens` are computed in one step."""

    def __init__(self, block_pool: BlockPool, *, max_sequences: int, max_batched_tokens: int) -> None:
        self.block_pool = block_pool
        self.max_sequences = max_sequences
        self.max_batched_tokens = max_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; the caller has made sure that the whole pool could hold it."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or running, and release its blocks."""
        (self.running if sequence.block_runs else self.waiting).remove(sequence)
        self.block_pool.release(sequence.block_runs)
        sequence.block_runs = []

    def schedule(self) -> list[Chunk]:
        """Choose the next step's chunks, oldest sequence first.

        A chunk that does not catch up takes the rest of the budget, so at most one sequence, the newest, is in the
        middle of its prompt, and a long prompt cannot stall the streams before it.
        """
        budget = self.max_batched_tokens
        chunks: list[Chunk] = []
        for sequence in self.running:
            if budget == 0:
                return chunks
            chunks.append(Chunk(sequence, min(sequence.pending_tokens, budget)))
            budget -= chunks[-1].tokens
        while budget > 0 and (admitted := self._admit_next()):
            chunks.append(Chunk(admitted, min(admitted.pending_tokens, budget)))
            budget -= chunks[-1].tokens
        return chunks

    def reserved_by_waiting(self) -> int:
        """Blocks that the waiting sequences will take."""
        return sum(self.block_pool.blocks_for(sequence.max_total_tokens) for sequence in self.waiting)

    def _admit_next(self) -> Sequence | None:
        if not self.waiting or len(self.running) >= self.max_sequences:
            return None
        blocks = self.block_pool.blocks_for(self.waiting[0].max_total_tokens)
        if blocks > self.block_pool.free_blocks:
            return None
        sequence = self.waiting.popleft()
        sequence.block_runs = self.block_pool.allocate(blocks)
        self.running.append(sequence)
        return sequence
