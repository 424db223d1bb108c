"""The results of a bench as a table and as JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from spillway.bench.measure import Row, Skipped

DIGITS = 4  # decimals in JSON; further ones are noise


def as_json(
    benchmark: str, environment: dict[str, Any], rounds: int, outcomes: Sequence[Row | Skipped]
) -> dict[str, Any]:
    """Return one object per row, the skipped loads with their reasons, and the environment."""
    return {
        "benchmark": benchmark,
        "rounds": rounds,
        "environment": environment,
        "rows": [_rounded(dataclasses.asdict(row)) for row in outcomes if isinstance(row, Row)],
        "skipped": [dataclasses.asdict(skipped) for skipped in outcomes if isinstance(skipped, Skipped)],
    }


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, DIGITS) if isinstance(value, float) else value for name, value in fields.items()}


def headline(environment: dict[str, Any]) -> str:
    """Describe the target on one line."""
    if "pool" in environment:
        where = f" at {environment['url']}" if environment["url"] else ""
        length = f"{environment['max_model_len']:,} tokens of context"
        return f"{environment['model']} · pool {environment['pool']} · {environment['kind']}{where} · {length}"
    if "url" in environment:
        return f"{environment['model']} at {environment['url']}, as clients see it"
    return (
        f"{environment['model'].rsplit('/', maxsplit=1)[-1]} · {environment['parameters'] / 1e6:,.1f} M parameters · "
        f"{environment['quantize'] or environment['dtype']} · {environment['device_name']}"
        + (f", {environment['threads']} of {environment['cores']} cores" if environment["device"] == "cpu" else "")
        + f" · {environment['kv_tokens']:,} KV tokens · spillway {environment['spillway']}"
    )


def as_table(outcomes: Sequence[Row | Skipped]) -> Table:
    """Build a table of the measured rows, in the order of measurement."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in (
        "prompt\ntokens",
        "batch\n",
        "new\ntokens",
        "prefill\ns",
        "prefill\ntokens/s",
        "decode\ns",
        "decode\ntokens/s",
        "TTFT p50 / p99\nms",
        "TPOT p50 / p99\nms",
        "total\ns",
        "total\ntokens/s",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in outcomes:
        if isinstance(row, Row):
            table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> list[str]:
    return [
        f"{row.prompt_tokens:,}",
        f"{row.batch:,}",
        f"{row.new_tokens:,}",
        f"{row.prefill_s:,.3f}",
        _number(row.prefill_tokens_per_s),
        f"{row.decode_s:,.3f}",
        _number(row.decode_tokens_per_s),
        f"{_number(row.ttft_p50_ms)} / {_number(row.ttft_p99_ms)}",
        f"{_number(row.tpot_p50_ms)} / {_number(row.tpot_p99_ms)}",
        f"{row.total_s:,.3f}",
        _number(row.total_tokens_per_s),
    ]


def _number(value: float | None) -> str:
    """Format a number with at least three digits."""
    if value is None:
        return "-"
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
