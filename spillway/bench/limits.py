"""The limits of a pool that follow from what was measured, as lines of its configuration.

    holds    of one prompt length: the most requests at once whose TPOT p99 keeps the bound, below the first that do not
    useful   of one prompt length: the fewest of these that bring (nearly) all the throughput there is

More than `holds` at once is too slow for each of them; more than `useful` only wait in the server instead of in the
queue, where they could go elsewhere. So a pool should pull the least `holds`, and no more than the greatest `useful`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from spillway.bench.measure import Row

ALL_THROUGHPUT: Final = 0.95


@dataclass(frozen=True, slots=True)
class Memory:
    """What is known of the memory for keys and values."""

    kv_tokens: int | None  # that it holds, as the engine tells; None: it does not
    is_configurable: bool  # whether its pool can be told so: `max_kv_tokens`
    applies: bool = True  # an API has none that is any of our business

    def line(self) -> str:
        """Return what a configuration should say of it."""
        if self.kv_tokens is None:
            return "# max_kv_tokens: the server does not tell what its memory holds; its own log may"
        if not self.is_configurable:
            return f"# As it is, the engine's memory holds {self.kv_tokens:,} tokens"
        holds = f"max_kv_tokens = {self.kv_tokens}  # what its memory holds; "
        return holds + "a job takes its prompt + max_tokens of it: give models a default_max_tokens"


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """What was found for one prompt length."""

    prompt_tokens: int
    new_tokens: int
    holds: Row | None  # None: not even the smallest batch keeps the bound
    useful: Row | None
    breaks: Row | None  # the first that breaks it; None: none that was measured


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What a pool should be told."""

    pool: str
    max_tpot_ms: float
    held: Sequence[LengthLimits]
    max_sequences: int | None  # None: nothing keeps the bound at every length, or nothing could be judged
    memory: Memory

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
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
        """Return it for people: what holds at each length as comments, and what is to be pasted."""
        lines = [f"# Requests at once within {self.max_tpot_ms:g} ms a token (TPOT p99):"]
        lines += [f"#   {_summary(one)}" for one in self.held]
        lines.append(f"[pools.{_key(self.pool)}.engine]")
        if self.max_sequences is None:
            lines.append(f"# max_sequences: {self._why_none()}")
        else:
            lines.append(f"max_sequences = {self.max_sequences}")
        return [*lines, self.memory.line()] if self.memory.applies else lines

    def _why_none(self) -> str:
        if any(one.holds is None and one.breaks is not None for one in self.held):
            return f"not even the fewest keep {self.max_tpot_ms:g} ms at every length"
        return "nothing could be judged"


def recommend(rows: Sequence[Row], max_tpot_ms: float, *, pool: str, memory: Memory) -> Recommendation:
    """Judge what was measured."""
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
        useful = f"; {one.useful.batch} bring as many tokens/s"
    return (
        f"{length} {one.holds.batch} ({one.holds.tpot_p99_ms:,.1f} ms, {one.holds.total_tokens_per_s:,.0f} tokens/s)"
        f"{useful}{broken}"
    )


def _key(name: str) -> str:
    """Return a TOML key."""
    return name if name.isascii() and name.replace("-", "").replace("_", "").isalnum() else f'"{name}"'
