"""``spillway db``: upgrade and check the database."""

import asyncio
import dataclasses
import logging
from datetime import UTC, date, datetime
from typing import Annotated

import typer

from ledger.check import DayCheck, check_rollups
from ledger.retention import kept_since_unix_ms
from spillway import logs
from spillway.cli.connections import database
from spillway.cli.context import ResolvedConfig, command, out
from spillway.cli.output import JsonOption

log = logging.getLogger(__name__)


@logs.configured("migrate")
@command
async def upgrade_(config: ResolvedConfig) -> None:
    """Upgrade the database to this version's schema. Safe to run again, and concurrently on several machines."""
    from migrations import current, head, upgrade  # noqa: PLC0415 - imports Alembic, which other commands do not need

    # The default database is a file in the data folder.
    config.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = await asyncio.to_thread(current, config.database_url)
    await asyncio.to_thread(upgrade, config.database_url)
    if before == head():
        log.info("database schema: already at %s; nothing changed", before)
    else:
        log.info("database schema: %s -> %s", before or "none", head())


@command
async def check_rollups_(
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Rebuild the days that differ.")] = False,
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """Compare rollups with the sums of the requests. --repair rebuilds the days that differ."""
    async with database(config) as engine:
        kept_days = config.ledger.retention_days
        since_unix_ms = kept_since_unix_ms(kept_days) if kept_days else 0
        days = await check_rollups(engine, repair=repair, since_unix_ms=since_unix_ms)
    wrong = [day for day in days if day.wrong]
    if as_json:
        out.print_json(data=[{**dataclasses.asdict(day), "day": str(_day(day)), "repaired": repair} for day in days])
    else:
        for day in wrong:
            done = "rebuilt" if repair else "differ"
            out.print(f"{_day(day)}: {day.wrong} rollups {done} ({', '.join(day.columns)}), {day.requests} requests")
        requests = sum(day.requests for day in days)
        out.print(f"{requests:,} requests of {len(days)} days checked, {len(wrong)} days differed")
    if wrong and not repair:
        raise typer.Exit(1)


def _day(day: DayCheck) -> date:
    return datetime.fromtimestamp(day.begin_unix_ms / 1000, UTC).date()
