"""Histograms that merge by adding up their counts, with bins of a fixed relative width.

Bin k holds the values in (g^(k-1), g^k] with g = 1.04, and is read as their middle, 2 g^k / (g + 1): so no value is
told more than 2 % wrong, whatever its size (DDSketch, Masson et al., VLDB 2019). Values up to 0.01 are in bin ZERO.
On disk a histogram is a msgpack map from bin to count.
"""

import math
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

BASE: Final = 1.04
RELATIVE_ERROR: Final = 0.02
LEAST: Final = 0.01  # smaller values count as 0
ZERO: Final = -1000  # far below the bin of LEAST

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
_decoder = msgspec.msgpack.Decoder(Counts)
_encode = msgspec.msgpack.Encoder().encode


def bin_of(value: float) -> int:
    """The bin that holds a value."""
    return ZERO if value <= LEAST else math.ceil(math.log(value) / _LOG_BASE - 1e-9)


def value_of(bin_number: int) -> float:
    """The value that stands for a bin's."""
    return 0.0 if bin_number == ZERO else 2 * BASE**bin_number / (BASE + 1)


def upper_edge(bin_number: int) -> float:
    """The greatest value of a bin."""
    return 0.0 if bin_number == ZERO else BASE**bin_number


def encode(counts: Counts) -> bytes | None:
    """For a column; None: no values. The same counts give the same bytes."""
    kept = {number: counts[number] for number in sorted(counts) if counts[number]}
    return _encode(kept) if kept else None


def decode(stored: bytes | None) -> Counts:
    """From a column. Raises msgspec.DecodeError for what was never encoded here."""
    return _decoder.decode(stored) if stored else {}


def add(into: Counts, more: Mapping[int, int], sign: int = 1) -> None:
    """Merge, or with ``sign`` -1 take away."""
    for number, count in more.items():
        into[number] = into.get(number, 0) + sign * count


def percentile(counts: Mapping[int, int], percent: float) -> float | None:
    """The value at rank ceil(n x percent / 100), within RELATIVE_ERROR; None: there are no values."""
    n = sum(counts.values())
    rank = max(1, math.ceil(n * percent / 100))
    for number in sorted(counts):
        rank -= counts[number]
        if rank <= 0:
            return value_of(number)
    return None
