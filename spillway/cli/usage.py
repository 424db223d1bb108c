"""``spillway usage``: requests, tokens and latencies."""

import csv
import dataclasses
import json
import sys
from collections.abc import Sequence
from datetime import datetime, tzinfo
from enum import StrEnum
from typing import Annotated, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ledger.csv_cells import guarded
from ledger.days import UnknownTimeZone, parse_zone
from ledger.report import GroupBy, ReportTooLarge, UsageRow, usage_report
from spillway.cli.connections import database
from spillway.cli.context import ConfigOption, DataOption, fail, out, run_async, running_or_config

TABLE_WIDTH_CHARS: Final = 140
GROUPS: Final[dict[str, GroupBy]] = {"model": "model", "key": "key", "day": "day"}


class Format(StrEnum):
    """The output format of the report."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def usage(
    by: Annotated[str, typer.Option(help="Group by these, separated by commas: model, key, day.")] = "model,key,day",
    since: Annotated[
        datetime | None, typer.Option(help="From this local time on (2026-05-31 or 2026-05-31T12:00:00).")
    ] = None,
    until: Annotated[datetime | None, typer.Option(help="Before this local time.")] = None,
    timezone: Annotated[
        str | None, typer.Option(help="Days and times of this zone, such as Asia/Kolkata. Default: this machine's.")
    ] = None,
    output: Annotated[Format, typer.Option("--format", "-f", help="Output format.")] = Format.TABLE,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Show requests, tokens, TTFT, TPOT and queue wait.

    TTFT: receipt to first token. TPOT: time per output token after the first. Both as medians (p50) and, for TTFT and
    queue wait, the 95th percentile, in milliseconds.
    """
    groups = _groups(by)
    zone = _zone(timezone)
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with database(resolved) as engine:
            rows = await usage_report(
                engine,
                group_by=groups,
                since_unix_ms=_unix_ms(since, zone),
                until_unix_ms=_unix_ms(until, zone),
                zone=zone,
            )
        _print(rows, groups, Format.JSON if as_json else output)

    try:
        run_async(main)
    except ReportTooLarge as error:
        raise fail(str(error)) from error


def _groups(by: str) -> list[GroupBy]:
    names = [name.strip() for name in by.split(",") if name.strip()]
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        raise typer.BadParameter(
            f"cannot group by {', '.join(unknown)}; choose from {', '.join(GROUPS)}", param_hint="--by"
        )
    return [GROUPS[name] for name in names]


def _zone(name: str | None) -> tzinfo | None:
    try:
        return parse_zone(name)
    except UnknownTimeZone as error:
        raise typer.BadParameter(str(error), param_hint="--timezone") from error


def _unix_ms(moment: datetime | None, zone: tzinfo | None) -> int | None:
    if moment is None:
        return None
    local = moment.replace(tzinfo=zone) if zone else moment.astimezone()
    return int(local.timestamp() * 1000)


def _print(rows: Sequence[UsageRow], groups: Sequence[GroupBy], output: Format) -> None:
    records = [dataclasses.asdict(row) for row in rows]
    if output is Format.JSON:
        out.print_json(json.dumps(records, default=str))
    elif output is Format.CSV:
        columns = [field.name for field in dataclasses.fields(UsageRow)]
        csv.writer(sys.stdout).writerows([columns, *(guarded(record, columns) for record in records)])
    elif not rows:
        out.print("no requests in this time")
    else:
        # A pipe has no width, and wrapping by a narrow terminal is better than truncation by rich.
        Console(width=max(out.width, TABLE_WIDTH_CHARS)).print(_table(rows, groups))


def _table(rows: Sequence[UsageRow], groups: Sequence[GroupBy]) -> Table:
    """Build a table of the columns that fit on a line of about 100 characters; the other formats have all."""
    caption = "TTFT, TPOT, queue wait: milliseconds, p50 / p95"
    if any(row.estimated for row in rows):
        caption += "\n≈: some of these tokens are estimated"
    table = Table(*groups, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption)
    for name in ("requests", "failed", "canc.", "retried", "prompt", "cached", "output", "TTFT", "TPOT", "queue"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        key = row.key_name or row.key_id or ""
        labels = [{"day": str(row.day), "model": row.model or "", "key": key}[group] for group in groups]
        counts = (row.requests, row.failed, row.cancelled, row.retried)
        mark = "≈" if row.estimated else ""
        tokens = [f"{mark}{n:,}" for n in (row.prompt_tokens, row.cached_tokens, row.completion_tokens)]
        ttft = f"{_ms(row.ttft_p50_ms)} / {_ms(row.ttft_p95_ms)}"
        queue = f"{_ms(row.queue_p50_ms)} / {_ms(row.queue_p95_ms)}"
        table.add_row(*labels, *(f"{n:,}" for n in counts), *tokens, ttft, _ms(row.tpot_p50_ms), queue)
    return table


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
