"""The KV pool's bookkeeping: which blocks are free and how often each is used. Imports no torch.

A block is `block_size` tokens of keys and values in every layer; the pool knows only the blocks' numbers. Reference
counts let sequences share blocks; the prefix cache will keep released blocks findable by the hash of their tokens,
and its place is `release`.

The allocator prefers one contiguous run: attention on a CPU reads a run in place and has to copy anything else.
"""

from bisect import bisect_right, insort

from engine.errors import EngineCorrupted


class BlockPool:
    """Blocks 0 … total-1, each free or used by one or more owners. free + used = total, always."""

    def __init__(self, total_blocks: int, block_size: int) -> None:
        self.total_blocks = total_blocks
        self.block_size = block_size
        self._references = [0] * total_blocks
        self._free_blocks = total_blocks
        # Maximal free runs as (first block, one past the last), in order; never two that touch.
        self._free_runs: list[tuple[int, int]] = [(0, total_blocks)] if total_blocks else []

    @property
    def free_blocks(self) -> int:
        """Blocks nobody uses."""
        return self._free_blocks

    @property
    def used_blocks(self) -> int:
        """Blocks with at least one owner."""
        return self.total_blocks - self._free_blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[range]:
        """Take `count` blocks as few runs as possible; the caller owns one reference to each.

        Raises ValueError if fewer are free: ask `free_blocks` first.
        """
        if count > self._free_blocks:
            raise ValueError(f"{count} blocks asked for, {self._free_blocks} free")
        runs: list[range] = []
        while count > 0:
            runs.append(self._take_run(count))
            count -= len(runs[-1])
        return sorted(runs, key=lambda run: run.start)

    def retain(self, runs: list[range]) -> None:
        """Add an owner to blocks that are in use."""
        for run in runs:
            for block in run:
                if self._references[block] < 1:
                    raise EngineCorrupted(f"block {block} was retained while free")
                self._references[block] += 1

    def release(self, runs: list[range]) -> None:
        """Drop one owner of each block; blocks without owners become free."""
        for run in runs:
            for block in run:
                self._release_block(block)

    def check(self) -> None:
        """Raise EngineCorrupted unless counts, runs and references agree."""
        free = [block for start, stop in self._free_runs for block in range(start, stop)]
        if len(free) != self._free_blocks or any(self._references[block] for block in free):
            raise EngineCorrupted("the free runs disagree with the reference counts")
        if sum(1 for count in self._references if count) != self.used_blocks:
            raise EngineCorrupted("free and used blocks do not add up to the total")
        if any(left[1] >= right[0] for left, right in zip(self._free_runs, self._free_runs[1:], strict=False)):
            raise EngineCorrupted("the free runs overlap or touch")

    def _take_run(self, count: int) -> range:
        """Best fit: the smallest free run that holds `count`, else the whole of the largest."""
        lengths = [stop - start for start, stop in self._free_runs]
        fitting = [i for i, length in enumerate(lengths) if length >= count]
        chosen = min(fitting, key=lengths.__getitem__) if fitting else max(range(len(lengths)), key=lengths.__getitem__)
        start, stop = self._free_runs.pop(chosen)
        taken = range(start, min(start + count, stop))
        if taken.stop < stop:
            self._free_runs.insert(chosen, (taken.stop, stop))
        for block in taken:
            self._references[block] = 1
        self._free_blocks -= len(taken)
        return taken

    def _release_block(self, block: int) -> None:
        if self._references[block] < 1:
            raise EngineCorrupted(f"block {block} was released while free")
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free_blocks += 1
            self._merge_free(block)

    def _merge_free(self, block: int) -> None:
        at = bisect_right(self._free_runs, (block, block))
        start, stop = block, block + 1
        if at < len(self._free_runs) and self._free_runs[at][0] == stop:
            stop = self._free_runs.pop(at)[1]
        if at > 0 and self._free_runs[at - 1][1] == start:
            start = self._free_runs.pop(at - 1)[0]
        insort(self._free_runs, (start, stop))
