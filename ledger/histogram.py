"""Histograms that merge by adding up their counts, with bins of a fixed relative width.

Bin k holds the values in (g^(k-1), g^k] with g = 1.04, and is read as their middle, 2 g^k / (g + 1), so the relative
error of every value is at most 2 % (DDSketch, Masson et al., VLDB 2019). Values up to 0.01 are in bin ZERO.

On disk a histogram is a sequence of little-endian 32-bit entries, each a bin (16 bits) and its number of values (16
bits); a bin may occur more than once. Therefore concatenating the bytes merges histograms. The database does this
for large reads, and returns one long histogram per group instead of thousands of short ones.
"""

import math
import struct
from collections.abc import Mapping
from typing import Final, Literal

BASE: Final = 1.04
RELATIVE_ERROR: Final = 0.02
MIN_VALUE: Final = 0.01  # smaller values count as 0
ZERO: Final = -1000  # far below the bin of MIN_VALUE; the largest double is in bin 18,098
LONG_BYTES: Final = 1_024  # about twice the size of a distribution over all values
MAX_COUNT: Final = 0xFFFF  # values that an entry can hold

Measure = Literal["queue_ms", "ttft_ms", "tpot_ms", "total_ms", "prompt_tokens", "completion_tokens"]
MEASURES: Final[tuple[Measure, ...]] = (
    "queue_ms",
    "ttft_ms",
    "tpot_ms",
    "total_ms",
    "prompt_tokens",
    "completion_tokens",
)
Counts = dict[int, int]  # bin → how many values

_LOG_BASE: Final = math.log(BASE)


def bin_of(value: float) -> int:
    """Return the bin that holds a value."""
    return ZERO if value <= MIN_VALUE else math.ceil(math.log(value) / _LOG_BASE - 1e-9)


def value_of(bin_number: int) -> float:
    """Return the value that represents a bin."""
    return 0.0 if bin_number == ZERO else 2 * BASE**bin_number / (BASE + 1)


def upper_edge(bin_number: int) -> float:
    """Return the largest value of a bin."""
    return 0.0 if bin_number == ZERO else BASE**bin_number


def encode(counts: Mapping[int, int]) -> bytes | None:
    """Encode counts for a column; None: no values. Equal counts give equal bytes. No count may be negative."""
    entries: list[int] = []
    for number, count in sorted(counts.items()):
        if 0 < count <= MAX_COUNT:
            entries.append(number - ZERO << 16 | count)
        else:
            times, rest = divmod(count, MAX_COUNT)
            entries += [number - ZERO << 16 | part for part in (*[MAX_COUNT] * times, rest) if part]
    return struct.pack(f"<{len(entries)}I", *entries) if entries else None


def decode(stored: bytes | None) -> Counts:
    """Decode a column. Raises struct.error for bytes that ``encode`` did not write."""
    counts: Counts = {}
    for entry in struct.unpack(f"<{len(stored) // 4}I", stored) if stored else ():
        number = (entry >> 16) + ZERO
        counts[number] = counts.get(number, 0) + (entry & MAX_COUNT)
    return counts


def extended(stored: bytes | None, more: Mapping[int, int]) -> bytes | None:
    """Return the column for both histograms; negative counts of ``more`` subtract. Compacted only once it is long.

    Most columns hold few values, and appending the new ones costs a tenth of counting all of them again.
    """
    if (stored is None or len(stored) < LONG_BYTES) and all(count > 0 for count in more.values()):
        return (stored or b"") + (encode(more) or b"") or None
    counts = decode(stored)
    add(counts, more)
    return encode(counts)


def add(into: Counts, more: Mapping[int, int], sign: int = 1) -> None:
    """Add counts, or with ``sign`` -1 subtract them."""
    for number, count in more.items():
        into[number] = into.get(number, 0) + sign * count


def percentile(counts: Mapping[int, int], percent: float) -> float | None:
    """Return the value at rank ceil(n x percent / 100), within RELATIVE_ERROR; None: there are no values."""
    n = sum(counts.values())
    rank = max(1, math.ceil(n * percent / 100))
    for number in sorted(counts):
        rank -= counts[number]
        if rank <= 0:
            return value_of(number)
    return None
