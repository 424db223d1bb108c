"""How many requests, tokens and dollars: in all, by one or two dimensions, over time, by hour of the week."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.ledger.queries.window import NO_FILTERS, Dimension, Filters, Step, Window

Figure = Literal["requests", "failed", "failovers", "prompt_tokens", "completion_tokens", "tokens", "charge_nano_usd"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sums over one group of requests."""

    group: tuple[str, ...]  # its values of what was grouped by, in that order; OTHER for what top N leaves
    requests: int = 0
    ok: int = 0
    failed: int = 0
    cancelled: int = 0
    attempts: int = 0
    failovers: int = 0
    retried: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    charge_nano_usd: int = 0
    total_ms: int = 0


@dataclass(frozen=True, slots=True)
class Series:
    """One group over time: a Traffic for each step of the window, also where nothing happened."""

    group: tuple[str, ...]
    points: tuple[Traffic, ...]


async def totals(
    connection: AsyncConnection,
    window: Window,
    *,
    where: Filters = NO_FILTERS,
    by: Sequence[Dimension] = (),
    order: Figure = "requests",
    top: int | None = None,
) -> list[Traffic]:
    """Sums by up to two dimensions, greatest first; beyond ``top`` groups the rest is one, OTHER, the last.

    Without ``by`` there is exactly one.
    """
    raise NotImplementedError


async def series(
    connection: AsyncConnection,
    window: Window,
    step: Step,
    *,
    where: Filters = NO_FILTERS,
    by: Sequence[Dimension] = (),
    order: Figure = "requests",
    top: int | None = None,
) -> list[Series]:
    """The same over time; ``window.steps(step)`` are the points' times. Raises TooManySteps."""
    raise NotImplementedError


async def heat_map(
    connection: AsyncConnection, window: Window, *, where: Filters = NO_FILTERS, figure: Figure = "requests"
) -> list[list[int]]:
    """A figure by weekday (Monday first) and hour of the viewer's day: 7 rows of 24."""
    raise NotImplementedError


async def choices(connection: AsyncConnection, window: Window) -> dict[Dimension, list[str]]:
    """Which values each dimension has in the window, in alphabetical order: what filters can offer."""
    raise NotImplementedError
