"""Splits conversations into training, validation and test sets."""

import hashlib
from typing import Final

from ledger.payloads.errors import ExportError

NAMES: Final = ("train", "validation", "test")
TOLERANCE: Final = 1e-9


class Split:
    """Assigns each conversation to a part by its hash, independently of all others."""

    def __init__(self, shares: tuple[float, ...], seed: int) -> None:
        """Take the ``shares`` of train, validation and test; missing ones are 0. Raises ExportError."""
        is_whole = abs(sum(shares) - 1) < TOLERANCE
        if not is_whole or not 1 <= len(shares) <= len(NAMES) or not all(0 <= share <= 1 for share in shares):
            raise ExportError("--split: must be one to three shares that sum to 1, such as 0.9,0.05,0.05")
        self.shares = dict(zip(NAMES, shares, strict=False))
        self._seed = seed

    @property
    def parts(self) -> list[str]:
        """The parts with a share above 0."""
        return [name for name, share in self.shares.items() if share]

    def part_of(self, root: bytes) -> str:
        """Return the part of all conversations with this root (ledger.training.conversation)."""
        digest = hashlib.sha256(f"{self._seed}/".encode() + root).digest()
        position = int.from_bytes(digest[:7], "big") / 256**7  # 56 bits: exactly a float, and below 1
        end = 0.0
        for name in self.parts:
            end += self.shares[name]
            if position < end:
                return name
        return self.parts[-1]
