"""``spillway usage``: requests, tokens, cost and latencies."""

import csv
import dataclasses
import json
import sys
from collections.abc import Sequence
from datetime import datetime, tzinfo
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sqlalchemy.ext.asyncio import AsyncEngine

from db.money import charge_text, usd_text
from ledger.csv_cells import guarded
from ledger.days import NoMonth, UnknownTimeZone, parse_month, parse_zone
from ledger.focus import COLUMNS, FOCUS_BY, focus_rows
from ledger.queries.names import load_names
from ledger.queries.usage import USAGE_BY, UsageBy
from ledger.queries.usage import usage as read_usage
from ledger.queries.window import Window
from ledger.report import ReportTooLarge, UsageRow, usage_report, window_of
from spillway.cli.connections import database
from spillway.cli.context import ConfigOption, DataOption, fail, out, run_async, running_or_config

TABLE_WIDTH_CHARS: Final = 140


class Format(StrEnum):
    """The output format of the report."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    FOCUS = "focus"


def usage(
    by: Annotated[
        str, typer.Option(help="Group by any of team, key, model, tag, day, month; separate them with commas.")
    ] = "model,key,day",
    month: Annotated[
        str | None, typer.Option(help="A calendar month (2026-11), instead of --since and --until.")
    ] = None,
    since: Annotated[
        datetime | None, typer.Option(help="From this local time (2026-05-31 or 2026-05-31T12:00:00).")
    ] = None,
    until: Annotated[datetime | None, typer.Option(help="Before this local time.")] = None,
    timezone: Annotated[
        str | None,
        typer.Option(help="Time zone of days, months and times, such as Asia/Kolkata. Default: this machine's."),
    ] = None,
    output: Annotated[
        Format,
        typer.Option(
            "--format", "-f", help="Output format. focus: CSV with the FOCUS columns, by team, key and model."
        ),
    ] = Format.TABLE,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Show requests, tokens, cost, TTFT, TPOT and queue wait.

    TTFT: receipt to first token. TPOT: time per output token after the first. Latencies are in milliseconds, as medians
    (p50); TTFT and queue wait also have the 95th percentile. --since and --until are widened to full quarter hours. A
    request with several tags counts once for each tag.
    """
    groups = _groups(by)
    zone = _zone(timezone)
    span = _span(month, since, until, zone)
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with database(resolved) as engine:
            if output is Format.FOCUS:
                csv.writer(sys.stdout).writerows(await _focus(engine, groups, span, zone))
                return
            rows = await usage_report(engine, group_by=groups, since_unix_ms=span[0], until_unix_ms=span[1], zone=zone)
        _print(rows, groups, Format.JSON if as_json else output)

    try:
        run_async(main)
    except ReportTooLarge as error:
        raise fail(str(error)) from error


async def _focus(
    engine: AsyncEngine, groups: Sequence[UsageBy], span: tuple[int | None, int | None], zone: tzinfo | None
) -> list[list[object]]:
    """Return the rows of a FOCUS file, also by day or month if ``groups`` has them."""
    by = (*FOCUS_BY, *(name for name in groups if name in {"day", "month"}))
    async with engine.connect() as connection:
        window = await window_of(connection, *span, zone)
        if window is None:
            return [list(COLUMNS)]
        since, until = window.since_unix_ms if span[0] is None else span[0], span[1] or window.until_unix_ms
        window = Window(since, until, zone)
        return focus_rows(await read_usage(connection, window, by), await load_names(connection), window)


def _groups(by: str) -> list[UsageBy]:
    names = [name.strip() for name in by.split(",") if name.strip()]
    groups = [group for name in dict.fromkeys(names) for group in USAGE_BY if group == name]
    if len(groups) < len(dict.fromkeys(names)):
        unknown = [name for name in names if name not in USAGE_BY]
        raise typer.BadParameter(
            f"cannot group by {', '.join(unknown)}; choose from {', '.join(USAGE_BY)}", param_hint="--by"
        )
    return groups


def _span(
    month: str | None, since: datetime | None, until: datetime | None, zone: tzinfo | None
) -> tuple[int | None, int | None]:
    """Return the start and the end of the period in Unix milliseconds; None: unbounded."""
    if month is None:
        return _unix_ms(since, zone), _unix_ms(until, zone)
    if since is not None or until is not None:
        raise typer.BadParameter("cannot be combined with --since or --until", param_hint="--month")
    try:
        span = parse_month(month, zone)
    except NoMonth as error:
        raise typer.BadParameter(str(error), param_hint="--month") from error
    return span.since_unix_ms, span.until_unix_ms


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


def _print(rows: Sequence[UsageRow], groups: Sequence[UsageBy], output: Format) -> None:
    records = [_record(row) for row in rows]
    if output is Format.JSON:
        out.print_json(json.dumps(records))
    elif output is Format.CSV:
        columns = [field.name for field in dataclasses.fields(UsageRow)]
        columns.insert(columns.index("charge_nano_usd"), "charge_usd")
        csv.writer(sys.stdout).writerows([columns, *(guarded(record, columns) for record in records)])
    elif not rows:
        out.print("no requests in this period")
    else:
        # A pipe has no width, and a line that the terminal wraps is better than one that rich truncates.
        Console(width=max(out.width, TABLE_WIDTH_CHARS)).print(_table(rows, groups))


def _record(row: UsageRow) -> dict[str, Any]:
    """Return a row with its charge also in USD, as exact decimal text."""
    return {**dataclasses.asdict(row), "charge_usd": usd_text(row.charge_nano_usd)}


def _table(rows: Sequence[UsageRow], groups: Sequence[UsageBy]) -> Table:
    """Build a table of the columns that fit in about 100 characters. The other formats have all columns."""
    is_tagged = "tag" in groups
    caption = (
        "a request with several tags counts once for each tag"
        if is_tagged
        else "TTFT, TPOT, queue wait: milliseconds, p50 / p95"
    )
    if any(row.estimated for row in rows):
        caption += "\n≈: some of these tokens are estimated"
    if any(row.unpriced_tokens for row in rows):
        caption += "\nno price: tokens of models without a price in the configuration"
    table = Table(*groups, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption)
    counted = () if is_tagged else ("failed", "canc.", "retried")
    timed = () if is_tagged else ("TTFT", "TPOT", "queue")
    for name in ("requests", *counted, "prompt", "cached", "output", "charged", *timed):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        counts = (row.requests,) if is_tagged else (row.requests, row.failed or 0, row.cancelled or 0, row.retried or 0)
        mark = "≈" if row.estimated else ""
        tokens = [f"{mark}{n:,}" for n in (row.prompt_tokens, row.cached_tokens, row.completion_tokens)]
        charged = charge_text(row.charge_nano_usd, row.unpriced_tokens)
        ttft = f"{_ms(row.ttft_p50_ms)} / {_ms(row.ttft_p95_ms)}"
        queue = f"{_ms(row.queue_p50_ms)} / {_ms(row.queue_p95_ms)}"
        times = () if is_tagged else (ttft, _ms(row.tpot_p50_ms), queue)
        labels = [escape(_label(row, group)) for group in groups]
        table.add_row(*labels, *(f"{n:,}" for n in counts), *tokens, charged, *times)
    return table


def _label(row: UsageRow, group: UsageBy) -> str:
    labels: dict[UsageBy, str | None] = {
        "team": row.team_name or row.team_id,
        "key": row.key_name or row.key_id,
        "model": row.model,
        "tag": row.tag,
        "day": row.day,
        "month": row.month,
    }
    return labels[group] or ""


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
