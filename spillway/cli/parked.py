"""``spillway parked``: usage records that no ledger writer could store yet, and why."""

from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ledger.parked import parked_records, replay
from protocol.usage import ParkedUsage
from protocol.wire import UNDECODABLE
from spillway.cli.connections import queue_server
from spillway.cli.context import ResolvedConfig, command, out


@command
async def parked(
    *,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Maximum number, oldest first.")] = 20,
    again: Annotated[bool, typer.Option("--replay", help="Send them to the ledger writers again.")] = False,
    config: ResolvedConfig,
) -> None:
    """List usage records that were not understood, or that the database has refused.

    A record of a newer release waits here for a ledger writer that understands it and replays it automatically. The
    queue server must be running. Records that fail again after --replay are parked again.
    """
    table = Table("parked (UTC)", "record", "reason", box=SIMPLE_HEAD)
    async with queue_server(config, "spillway parked") as bus:
        async for sequence, record in parked_records(bus):
            if again:
                await replay(bus, sequence, record)
            table.add_row(_time(record), _summary(record), record.reason)
            if table.row_count == limit:
                break
    if table.row_count:
        out.print(table)
    out.print(f"{table.row_count or 'no'} records parked" + (", sent to the ledger writers again" if again else ""))


def _time(record: ParkedUsage) -> str:
    return datetime.fromtimestamp(record.parked_unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _summary(record: ParkedUsage) -> str:
    """Describe a record without understanding it."""
    try:
        fields: Any = msgspec.msgpack.decode(record.message)[0]
        return f"{fields['type']} {fields['request_id']} of {fields.get('key_id', 'unknown')} (protocol {fields['v']})"
    except (*UNDECODABLE, LookupError, TypeError):
        return f"{len(record.message)} bytes"
