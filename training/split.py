"""Which conversations are for training, and which for looking how well it went."""

import hashlib
from typing import Final

from ledger.payloads.errors import ExportError

NAMES: Final = ("train", "validation", "test")
TOLERANCE: Final = 1e-9


class Split:
    """Puts each conversation into one part by its hash: the same whatever else there is."""

    def __init__(self, shares: tuple[float, ...], seed: int) -> None:
        """``shares`` of train, validation and test; missing ones are 0. Raises ExportError."""
        is_whole = abs(sum(shares) - 1) < TOLERANCE
        if not is_whole or not 1 <= len(shares) <= len(NAMES) or not all(0 <= share <= 1 for share in shares):
            raise ExportError("the split must be one to three shares that sum up to 1, such as 0.9,0.05,0.05")
        self.shares = dict(zip(NAMES, shares, strict=False))
        self._seed = seed

    @property
    def parts(self) -> list[str]:
        """Those that get anything."""
        return [name for name, share in self.shares.items() if share]

    def part_of(self, root: bytes) -> str:
        """The part of all conversations with this root (training.conversation)."""
        digest = hashlib.sha256(f"{self._seed}/".encode() + root).digest()
        position = int.from_bytes(digest[:7], "big") / 256**7  # 56 bits: exactly a float, and below 1
        end = 0.0
        for name in self.parts:
            end += self.shares[name]
            if position < end:
                return name
        return self.parts[-1]
