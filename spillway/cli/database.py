"""``spillway db``: preparing and checking the database."""

import asyncio
from datetime import UTC, datetime
from typing import Annotated

import typer

from ledger.check import check_rollups
from ledger.retention import kept_since_unix_ms
from spillway.cli.connections import database
from spillway.cli.context import ConfigOption, DataOption, out, run_async, running_or_config


def upgrade_(config: ConfigOption = None, data: DataOption = None) -> None:
    """Upgrade the database to this version's schema. Safe to run again, and concurrently on several machines."""
    from migrations import current, head, upgrade  # noqa: PLC0415 - imports Alembic, which other commands do not need

    resolved = running_or_config(config, data)

    async def main() -> None:
        before = await asyncio.to_thread(current, resolved.database_url)
        await asyncio.to_thread(upgrade, resolved.database_url)
        out.print(f"database schema: {before or 'none'} -> {head()}")

    # The default database is a file in the data folder.
    resolved.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    run_async(main)


def check_rollups_(
    repair: Annotated[bool, typer.Option("--repair", help="Rebuild the days that differ.")] = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Compare rollups with the sums of the requests. --repair rebuilds the days that differ."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        async with database(resolved) as engine:
            kept_days = resolved.ledger.retention_days
            since_unix_ms = kept_since_unix_ms(kept_days) if kept_days else 0
            days = await check_rollups(engine, repair=repair, since_unix_ms=since_unix_ms)
        wrong = [day for day in days if day.wrong]
        for day in wrong:
            name = datetime.fromtimestamp(day.begin_unix_ms / 1000, UTC).date()
            out.print(f"{name}: {day.wrong} rollups {'rebuilt' if repair else 'are wrong'}, {day.requests} requests")
        out.print(
            f"{sum(day.requests for day in days):,} requests of {len(days)} days checked, {len(wrong)} days differed"
        )
        if wrong and not repair:
            raise typer.Exit(1)

    run_async(main)
