"""Recommended limits of a pool, derived from the measurements, as lines of its configuration.

    holds    for one prompt length: the most concurrent requests whose TPOT p99 is within the bound, below the first
             measured number that exceeds it
    useful   for one prompt length: the fewest of these that reach (nearly) the maximum throughput

With more than `holds` concurrent requests, each request is too slow. Requests beyond `useful` wait in the server. In
the queue, another pool could take them. A pool should therefore pull at most the smallest `holds` and at most the
largest `useful`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from spillway.bench.measure import Row

ALL_THROUGHPUT: Final = 0.95


@dataclass(frozen=True, slots=True)
class Memory:
    """The known size of the KV memory."""

    kv_tokens: int | None  # capacity that the engine reports; None: unknown
    is_configurable: bool  # whether the pool has the setting `max_kv_tokens`
    applies: bool = True  # False for an API, whose memory Spillway does not manage

    def line(self) -> str:
        """Return the line for the configuration."""
        if self.kv_tokens is None:
            return "# max_kv_tokens: the server does not report the size of its KV memory. See its log"
        if not self.is_configurable:
            return f"# With the current settings, the engine's KV memory holds {self.kv_tokens:,} tokens"
        holds = f"max_kv_tokens = {self.kv_tokens}  # size of the KV memory. "
        return holds + "A job reserves its prompt + max_tokens: set default_max_tokens for your models"


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """The result for one prompt length."""

    prompt_tokens: int
    new_tokens: int
    holds: Row | None  # None: not even the smallest batch is within the bound
    useful: Row | None
    breaks: Row | None  # the first batch that exceeds it; None: no measured batch does


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The recommended settings of a pool."""

    pool: str
    max_tpot_ms: float
    held: Sequence[LengthLimits]
    max_sequences: int | None  # None: no batch is within the bound at every length, or there is no result
    memory: Memory

    def as_json(self) -> dict[str, Any]:
        """Return the recommendation as JSON values."""
        return {
            "pool": self.pool,
            "max_tpot_ms": self.max_tpot_ms,
            "max_sequences": self.max_sequences,
            "max_kv_tokens": self.memory.kv_tokens if self.memory.is_configurable else None,
            "by_length": [
                {
                    "prompt_tokens": one.prompt_tokens,
                    "new_tokens": one.new_tokens,
                    "holds": one.holds and one.holds.batch,
                    "useful": one.useful and one.useful.batch,
                    "breaks": one.breaks and one.breaks.batch,
                }
                for one in self.held
            ],
        }

    def as_lines(self) -> list[str]:
        """Return the recommendation as TOML lines: the results for each length as comments, and the settings."""
        lines = [f"# Concurrent requests within {self.max_tpot_ms:g} ms per token (TPOT p99):"]
        lines += [f"#   {_summary(one)}" for one in self.held]
        lines.append(f"[pools.{_key(self.pool)}.engine]")
        if self.max_sequences is None:
            lines.append(f"# max_sequences: {self._why_none()}")
        else:
            lines.append(f"max_sequences = {self.max_sequences}")
        return [*lines, self.memory.line()] if self.memory.applies else lines

    def _why_none(self) -> str:
        if any(one.holds is None and one.breaks is not None for one in self.held):
            return f"the smallest batch exceeds {self.max_tpot_ms:g} ms at some length"
        return "no usable result"


def recommend(rows: Sequence[Row], max_tpot_ms: float, *, pool: str, memory: Memory) -> Recommendation:
    """Derive the recommendation from the measured rows."""
    lengths = sorted({(row.prompt_tokens, row.new_tokens) for row in rows})
    held = [
        _limits_of([row for row in rows if (row.prompt_tokens, row.new_tokens) == one], max_tpot_ms) for one in lengths
    ]
    holds = [one.holds.batch for one in held if one.holds is not None]
    useful = [one.useful.batch for one in held if one.useful is not None]
    is_judged = bool(held) and len(holds) == len(held)
    return Recommendation(
        pool=pool,
        max_tpot_ms=max_tpot_ms,
        held=held,
        max_sequences=min(*holds, max(useful)) if is_judged else None,
        memory=memory,
    )


def _limits_of(rows: Sequence[Row], max_tpot_ms: float) -> LengthLimits:
    judged = sorted((row for row in rows if row.tpot_p99_ms is not None), key=lambda row: row.batch)
    within: list[Row] = []
    breaks = None
    for row in judged:
        if row.tpot_p99_ms is not None and row.tpot_p99_ms > max_tpot_ms:
            breaks = row
            break
        within.append(row)
    best = max((row.total_tokens_per_s for row in within), default=0.0)
    useful = next((row for row in within if row.total_tokens_per_s >= ALL_THROUGHPUT * best), None)
    return LengthLimits(rows[0].prompt_tokens, rows[0].new_tokens, within[-1] if within else None, useful, breaks)


def _summary(one: LengthLimits) -> str:
    length = f"{one.prompt_tokens:,} + {one.new_tokens:,} tokens:"
    broken = "" if one.breaks is None else f"; {one.breaks.batch}: {one.breaks.tpot_p99_ms:,.1f} ms"
    if one.holds is None:
        return f"{length} none{broken}"
    useful = ""
    if one.useful is not None and one.useful is not one.holds:
        useful = f"; same tokens/s with {one.useful.batch}"
    return (
        f"{length} {one.holds.batch} ({one.holds.tpot_p99_ms:,.1f} ms, {one.holds.total_tokens_per_s:,.0f} tokens/s)"
        f"{useful}{broken}"
    )


def _key(name: str) -> str:
    """Return a TOML key."""
    return name if name.isascii() and name.replace("-", "").replace("_", "").isalnum() else f'"{name}"'
