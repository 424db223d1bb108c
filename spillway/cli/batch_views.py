"""The output of ``spillway batch``. Batches are the API's JSON objects."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

OVER: Final = frozenset({"completed", "failed", "expired", "cancelled"})
SHOWN_ERRORS: Final = 10  # of a batch that failed


def counts_of(batch: dict[str, Any]) -> dict[str, int]:
    """Return the number of lines in total, completed and failed."""
    counts = batch.get("request_counts") or {}
    return {name: int(counts.get(name) or 0) for name in ("total", "completed", "failed")}


def summary_of(batch: dict[str, Any]) -> str:
    """Summarize a batch's progress in one line."""
    counts = counts_of(batch)
    if not counts["total"]:
        return f"{batch['status']}"
    text = (
        f"{batch['status']}: {counts['completed']:,} of {counts['total']:,} lines answered, {counts['failed']:,} failed"
    )
    usage = batch.get("usage") or {}
    if usage.get("total_tokens"):
        text += f"; {usage['input_tokens']:,} + {usage['output_tokens']:,} tokens"
    return text


def facts_of(batch: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the non-empty fields of a batch as labels and texts."""
    yield "id", batch["id"]
    yield "status", summary_of(batch)
    yield "endpoint", batch["endpoint"]
    if batch.get("model"):
        yield "model", batch["model"]
    for name in ("created", "in_progress", "finalizing", "cancelling", "completed", "failed", "expired", "cancelled"):
        if batch.get(f"{name}_at"):
            yield name, _time(batch[f"{name}_at"])
    if batch["status"] not in OVER:
        yield "due", _time(batch.get("expires_at"))
    for name in ("input_file_id", "output_file_id", "error_file_id"):
        if batch.get(name):
            yield name.removesuffix("_id").replace("_", " "), batch[name]
    for error in ((batch.get("errors") or {}).get("data") or [])[:SHOWN_ERRORS]:
        yield "error", f"line {error.get('line')}: {error.get('code')}: {error.get('message')}"


def table_of(batches: list[dict[str, Any]]) -> Table:
    table = Table("created", "id", "status", "endpoint", "answered", "failed", "lines", "due", box=SIMPLE_HEAD)
    for batch in batches:
        counts = counts_of(batch)
        due = "" if batch["status"] in OVER else _time(batch.get("expires_at"))
        numbers = (f"{counts[name]:,}" for name in ("completed", "failed", "total"))
        row = (_time(batch["created_at"]), batch["id"], batch["status"], batch["endpoint"], *numbers, due)
        table.add_row(*map(escape, row))
    return table


def _time(unix_s: int | None) -> str:
    return "" if unix_s is None else f"{datetime.fromtimestamp(unix_s).astimezone():%Y-%m-%d %H:%M:%S}"
