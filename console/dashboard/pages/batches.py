"""Batches: running ones with their progress, ended ones, and a single one."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard import formats
from console.dashboard.pages.requests import read_cursor, write_cursor
from console.dashboard.view import View
from db.prices import PriceBook, load_prices
from ledger.queries.batches import (
    ENDPOINTS,
    FILTERED,
    BatchLine,
    batch_choices,
    batch_named,
    ended_batches,
    file_sizes,
    open_batches,
)
from ledger.queries.log import Cursor
from ledger.queries.names import load_names
from protocol.nats.clock import unix_now_ms

PAGE_ROWS: Final = 50
MAX_OPEN: Final = 200  # shown
MARKS: Final = {  # the CSS class of a state; others run
    "completed": "ok",
    "failed": "failed",
    "expired": "expired",
    "cancelled": "cancelled",
    "cancelling": "cancelled",
}


@dataclass(frozen=True, slots=True)
class ShownBatch:
    """A batch, and what follows from its row."""

    row: BatchLine
    charge_nano_usd: int | None  # at the price when it was created; None: no price, or several models
    at_unix_ms: int

    @property
    def mark(self) -> str:
        """The CSS class of its state."""
        return MARKS.get(self.row["status"], "tier")

    @property
    def models(self) -> dict[str, tuple[int, int]]:
        """By model: lines, tokens as estimated."""
        return _models(self.row)

    @property
    def endpoint(self) -> str:
        """The endpoint of its lines, by the ledger's name."""
        path: str = self.row["endpoint"]
        return next((name for name, known in ENDPOINTS.items() if known == path), path)

    @property
    def done(self) -> int:
        """Lines that are in a result file."""
        return int(self.row["completed"] + self.row["failed"])

    @property
    def lines_per_s(self) -> float | None:
        """How fast lines have been done since it began; None: not yet, or nothing."""
        began = self.row["in_progress_unix_ms"]
        spent_ms = (self.row["over_unix_ms"] or self.at_unix_ms) - (began or 0)
        return self.done * 1000 / spent_ms if began and self.done and spent_ms > 0 else None

    @property
    def left_ms(self) -> float | None:
        """How long the rest takes at that speed; None: unknown, or over."""
        speed = self.lines_per_s
        return None if speed is None or self.row["over_unix_ms"] else (self.row["total"] - self.done) * 1000 / speed

    @property
    def is_late(self) -> bool:
        """True where the rest takes longer than there is time."""
        left_ms = self.left_ms
        return left_ms is not None and self.at_unix_ms + left_ms > self.row["expires_unix_ms"]

    @property
    def requests_query(self) -> dict[str, Any]:
        """The filters of the log that show its requests, with other requests of its key at that endpoint and time."""
        return {
            "since": self.row["created_unix_ms"],
            "until": (self.row["over_unix_ms"] or self.at_unix_ms) + 1000,
            "key": self.row["key_id"],
            "endpoint": self.endpoint,
            **dict.fromkeys(("team", "model", "pool", "provider", "region", "tier", "outcome", "by", "and")),
        }


async def batches(connection: AsyncConnection, view: View, older: str) -> dict[str, Any]:
    """Return the values of batches.html."""
    rows = await ended_rows(connection, view, older)
    return {
        **rows,
        **await running_rows(connection, view),
        "page": "Batches",
        "choices": await batch_choices(connection, view.since_unix_ms, view.until_unix_ms, where=view.scope),
        "filtered": FILTERED,
    }


async def running_rows(connection: AsyncConnection, view: View) -> dict[str, Any]:
    """Return the values of batches_running.html."""
    found = await open_batches(connection, view.filters, MAX_OPEN)
    return {
        "running": await _shown(connection, found),
        "names": await load_names(connection, view.teams),
        "MAX_OPEN": MAX_OPEN,
    }


async def ended_rows(connection: AsyncConnection, view: View, older: str) -> dict[str, Any]:
    """Return the values of the batches that are over: one page, those after the cursor ``older``."""
    cursor = read_cursor(older)
    after = None if cursor is None else (cursor.received_unix_ms, cursor.request_id)
    found, following = await ended_batches(
        connection, view.since_unix_ms, view.until_unix_ms, where=view.filters, after=after, limit=PAGE_ROWS
    )
    older = "" if following is None else write_cursor(Cursor(*following))
    return {"ended": await _shown(connection, found), "older": older, "is_first": after is None}


async def batch_detail(connection: AsyncConnection, view: View, batch_id: str) -> dict[str, Any] | None:
    """Return the values of batch.html; None: there is no such batch."""
    row = await batch_named(connection, batch_id)
    if row is None or not view.sees_team(row["team_id"]):
        return None
    (batch,) = await _shown(connection, [row])
    names, files = await load_names(connection, view.teams), await _files(connection, row)
    return {
        "page": "Batches",
        "batch": batch,
        "facts": _facts(batch, names, view),
        "files": files,
        "errors": json.loads(row["errors"]) if row["errors"] else [],
        "metadata": json.loads(row["custom_metadata"]) if row["custom_metadata"] else {},
    }


async def _shown(connection: AsyncConnection, rows: Sequence[BatchLine]) -> list[ShownBatch]:
    prices = await load_prices(connection) if rows else PriceBook()
    now_ms = unix_now_ms()
    return [ShownBatch(row, _charge(prices, row), now_ms) for row in rows]


def _charge(prices: PriceBook, row: BatchLine) -> int | None:
    models = list(_models(row))
    if len(models) != 1:
        return None
    tokens = (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"])
    return prices.charge_nano_usd(models[0], row["created_unix_ms"], *tokens)


def _models(row: BatchLine) -> dict[str, tuple[int, int]]:
    return dict(json.loads(row["models"])) if row["models"] else {}


async def _files(connection: AsyncConnection, row: BatchLine) -> list[tuple[str, str, int | None]]:
    """Return kind, id and size in bytes of each file of a batch; None: deleted."""
    ids = {"Input": row["input_file_id"], "Answers": row["output_file_id"], "Errors": row["error_file_id"]}
    sizes = await file_sizes(connection, ids.values())
    return [(what, file_id, sizes.get(file_id)) for what, file_id in ids.items() if file_id is not None]


def _facts(batch: ShownBatch, names: dict[str, str], view: View) -> list[tuple[str, str]]:
    row = batch.row
    speed = batch.lines_per_s
    facts = [
        ("Endpoint", row["endpoint"]),
        ("API", "Anthropic" if row["surface"] == "anthropic" else "OpenAI"),
        ("Key", row["key_name"]),
        ("Team", names.get(row["team_id"], row["team_id"]) or formats.NOTHING),
        ("Models", ", ".join(batch.models) or formats.NOTHING),
        ("Lines", formats.count(row["total"])),
        ("Answered", formats.count(row["completed"])),
        ("Failed", formats.count(row["failed"] - row["given_up"])),
        ("Given up", formats.count(row["given_up"])),
        ("Lines a second", formats.NOTHING if speed is None else f"{speed:,.1f}"),
        ("Prompt tokens", f"{formats.count(row['prompt_tokens'])} ({formats.count(row['cached_tokens'])} cached)"),
        ("Completion tokens", formats.count(row["completion_tokens"])),
        ("Estimated tokens", formats.count(sum(tokens for _, tokens in batch.models.values()))),
        ("Charged (estimate)", formats.money(batch.charge_nano_usd)),
        ("Window", row["completion_window"]),
        ("Gateway", row["holder"] or "none yet"),
        ("Taken over", formats.count(max(0, row["epoch"] - 1))),
    ]
    return [*facts, *_moments(batch, view)]


def _moments(batch: ShownBatch, view: View) -> Iterable[tuple[str, str]]:
    row = batch.row
    moments = {
        "Created": row["created_unix_ms"],
        "In progress": row["in_progress_unix_ms"],
        "Cancelling": row["cancelling_unix_ms"],
        "Finalizing": row["finalizing_unix_ms"],
        "Ended": row["over_unix_ms"],
        "Due": row["expires_unix_ms"],
    }
    return [(name, formats.moment(unix_ms, view.zone)) for name, unix_ms in moments.items() if unix_ms is not None]
