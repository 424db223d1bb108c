"""The KV pool's bookkeeping: the free, used and cached blocks and their owners. Imports no torch.

A block is `block_size` tokens of keys and values in every layer; the pool knows only the blocks' numbers.

            allocate                          release, without a key
    blank ────────────> used (1 or more owners) ─────────────────────> blank
      ^                  │  ^                                             ^
      │ evicted, the     │  │ match                                       │
      │ longest unused   v  │                                             │
      └──────────────── cached (no owner, found by its key) ──────────────┘ forget

A key identifies the tokens of a block and all tokens before it (`extend_keys`), so a sequence with the same prompt
finds its blocks, used or cached. Cached blocks are free: they are merely the last to be allocated.

The allocator prefers one contiguous run: attention on a CPU reads a run in place.
"""

from array import array
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

from engine.errors import EngineCorrupted

# --- prefix keys ------------------------------------------------------------------------------------------------------
#
# Keys for blocks of tokens that cover everything their keys and values depend on.
#
# The keys and values of a token depend on the token, on all tokens before it, and on the adapter that computed them.
# So a block's key is the hash of its tokens and of the previous block's key, or of the adapter's name for the first
# block, as in vLLM's prefix caching. The hash is cryptographic: with a weaker one, a client could craft a prompt that
# is answered from another client's blocks.
#
# A request's salt is hashed into its first block's key, so that only requests of the same salt share blocks. Otherwise
# the count of cached tokens would tell a client, block by block, whether another client sent the same prompt.

KEY_BYTES: Final = 16


def extend_keys(
    keys: list[bytes], token_ids: Sequence[int], block_size: int, adapter: str | None = None, cache_salt: str = ""
) -> None:
    """Append the missing keys of the whole blocks of `token_ids`, computed with `adapter`."""
    for start in range(len(keys) * block_size, len(token_ids) - block_size + 1, block_size):
        digest = blake2b(keys[-1] if keys else _root(adapter, cache_salt), digest_size=KEY_BYTES)
        digest.update(array("I", token_ids[start : start + block_size]).tobytes())
        keys.append(digest.digest())


def _root(adapter: str | None, cache_salt: str) -> bytes:
    """Return the parent of the first block's key; it differs by adapter and salt."""
    return blake2b(repr((adapter, cache_salt)).encode(), digest_size=KEY_BYTES).digest()


# --- block pool -------------------------------------------------------------------------------------------------------


class BlockPool:
    """The blocks 0 … total-1. blank + cached + used = total, always."""

    def __init__(self, total_blocks: int, block_size: int) -> None:
        self.total_blocks = total_blocks
        self.block_size = block_size
        self._references = [0] * total_blocks
        self._keys: list[bytes | None] = [None] * total_blocks
        self._block_of: dict[bytes, int] = {}
        self._cached: dict[int, None] = {}  # least recently used first
        self._blank_blocks = total_blocks
        # Maximal blank runs as (first block, one past the last), in order; adjacent runs are joined.
        self._blank_runs: list[tuple[int, int]] = [(0, total_blocks)] if total_blocks else []

    @property
    def free_blocks(self) -> int:
        """Number of blocks without an owner, blank or cached."""
        return self._blank_blocks + len(self._cached)

    @property
    def blank_blocks(self) -> int:
        """Number of blocks that can be allocated without evicting cached ones."""
        return self._blank_blocks

    @property
    def used_blocks(self) -> int:
        """Number of blocks with at least one owner."""
        return self.total_blocks - self.free_blocks

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int, after: int | None = None) -> list[range]:
        """Allocate `count` blocks in as few runs as possible, the first right after block `after` if that one is blank.

        The caller owns one reference to each. Evicts cached blocks if there are not enough blank ones. Raises
        ValueError if fewer are free: check `free_blocks` first.
        """
        if count > self.free_blocks:
            raise ValueError(f"{count} blocks requested, {self.free_blocks} free")
        while self._blank_blocks < count:
            self._evict(next(iter(self._cached)))
        runs: list[range] = []
        if after is not None and count and (run := self._take_at(after + 1, count)):
            runs.append(run)
            count -= len(run)
        while count > 0:
            runs.append(self._take_run(count))
            count -= len(runs[-1])
        return runs

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of a chain of keys. No reference count changes."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def retain(self, blocks: Sequence[int]) -> None:
        """Add an owner to blocks that are used or cached."""
        for block in blocks:
            if self._references[block] == 0:
                if block not in self._cached:
                    raise EngineCorrupted(f"block {block} was retained while blank")
                del self._cached[block]
            self._references[block] += 1

    def release(self, runs: Sequence[range]) -> None:
        """Drop one owner of each block. Of blocks that stay cached, the prompt's first is evicted last."""
        for run in reversed(runs):
            for block in reversed(run):
                self._release_block(block)

    def register(self, block: int, key: bytes) -> None:
        """Make a used block findable by its key, unless another block already has that key."""
        if self._references[block] < 1:
            raise EngineCorrupted(f"block {block} was given a key while free")
        if key not in self._block_of and self._keys[block] is None:
            self._keys[block] = key
            self._block_of[key] = block

    def forget(self, runs: Sequence[range]) -> None:
        """Drop the keys of these blocks: their contents are invalid."""
        for run in runs:
            for block in run:
                if block in self._cached:
                    self._evict(block)
                else:
                    self._drop_key(block)

    def forget_cached(self) -> None:
        """Drop the keys of all blocks without an owner."""
        while self._cached:
            self._evict(next(iter(self._cached)))

    def check(self) -> None:
        """Raise EngineCorrupted unless counts, runs, references and keys agree."""
        blank = [block for start, stop in self._blank_runs for block in range(start, stop)]
        if len(blank) != self._blank_blocks or any(self._references[b] or self._keys[b] for b in blank):
            raise EngineCorrupted("the blank runs disagree with the references or keys")
        if any(self._references[block] or not self._keys[block] for block in self._cached):
            raise EngineCorrupted("a cached block is used, or has no key")
        if sum(1 for count in self._references if count) != self.used_blocks:
            raise EngineCorrupted("blank, cached and used blocks do not add up to the total")
        if any(left[1] >= right[0] for left, right in zip(self._blank_runs, self._blank_runs[1:], strict=False)):
            raise EngineCorrupted("the blank runs overlap or touch")
        if {key: block for block, key in enumerate(self._keys) if key is not None} != self._block_of:
            raise EngineCorrupted("keys and blocks disagree")

    def _take_at(self, start: int, count: int) -> range | None:
        """Allocate at most `count` blocks from the blank run that begins at `start`, or return None."""
        at = bisect_right(self._blank_runs, (start, 0))
        if at == len(self._blank_runs) or self._blank_runs[at][0] != start:
            return None
        return self._take_from(at, count)

    def _take_run(self, count: int) -> range:
        """Take the smallest blank run that holds `count` (best fit), else all of the largest."""
        lengths = [stop - start for start, stop in self._blank_runs]
        fitting = [i for i, length in enumerate(lengths) if length >= count]
        chosen = min(fitting, key=lengths.__getitem__) if fitting else max(range(len(lengths)), key=lengths.__getitem__)
        return self._take_from(chosen, count)

    def _take_from(self, chosen: int, count: int) -> range:
        start, stop = self._blank_runs.pop(chosen)
        taken = range(start, min(start + count, stop))
        if taken.stop < stop:
            self._blank_runs.insert(chosen, (taken.stop, stop))
        for block in taken:
            self._references[block] = 1
        self._blank_blocks -= len(taken)
        return taken

    def _release_block(self, block: int) -> None:
        if self._references[block] < 1:
            raise EngineCorrupted(f"block {block} was released while free")
        self._references[block] -= 1
        if self._references[block] == 0:
            if self._keys[block] is None:
                self._become_blank(block)
            else:
                self._cached[block] = None

    def _evict(self, block: int) -> None:
        del self._cached[block]
        self._drop_key(block)
        self._become_blank(block)

    def _drop_key(self, block: int) -> None:
        key, self._keys[block] = self._keys[block], None
        if key is not None:
            del self._block_of[key]

    def _become_blank(self, block: int) -> None:
        self._blank_blocks += 1
        at = bisect_right(self._blank_runs, (block, block))
        start, stop = block, block + 1
        if at < len(self._blank_runs) and self._blank_runs[at][0] == stop:
            stop = self._blank_runs.pop(at)[1]
        if at > 0 and self._blank_runs[at - 1][1] == start:
            start = self._blank_runs.pop(at - 1)[0]
        insort(self._blank_runs, (start, stop))
