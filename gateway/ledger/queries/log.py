"""Single requests: a filtered list page by page, and one with its attempts. Reads raw rows, by their indexes."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.ledger.queries.window import NO_FILTERS, Filters

Row = dict[str, Any]  # column → value, as gateway.db.models says


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a page of requests ended: the next one begins with what is older."""

    received_unix_ms: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Page:
    """Some requests, the newest first."""

    requests: list[Row]  # of RequestRow
    next: Cursor | None  # None: there are no more


@dataclass(frozen=True, slots=True)
class RequestStory:
    """One request and how it came to its answer."""

    request: Row | None  # RequestRow; None: not ended yet, or its gateway died a moment ago
    attempts: list[Row]  # AttemptRow, in the order in which they were tried


async def request_page(
    connection: AsyncConnection,
    since_unix_ms: int,
    until_unix_ms: int,
    *,
    where: Filters = NO_FILTERS,
    after: Cursor | None = None,
    limit: int = 100,
) -> Page:
    """The newest ``limit`` requests received in [since, until) and older than ``after``."""
    raise NotImplementedError


async def request_story(connection: AsyncConnection, request_id: str) -> RequestStory | None:
    """One request with its attempts; None: there is no such request."""
    raise NotImplementedError
