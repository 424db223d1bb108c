"""``spillway dead-letters`` and ``spillway parked``: failed requests, and usage records that are not stored yet."""

from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import typer

from gateway.dispatch.attempt import counted_codes
from gateway.dispatch.records import newest_dead_letters
from ledger.parked import parked_records, replay
from protocol.usage import DeadLetter, ParkedUsage
from protocol.wire import UNDECODABLE
from spillway.cli.connections import queue_server
from spillway.cli.context import ResolvedConfig, command, out
from spillway.cli.output import JsonOption, print_table


@command
async def dead_letters(
    *,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Maximum number, newest first.")] = 20,
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """List requests that failed on every attempt, with the reason of each attempt.

    The queue server must be running. Dead letters are kept for 30 days and hold no prompts and no answers. The table
    counts attempts by error code; --json lists every attempt with its worker, reason and tokens.
    """
    async with queue_server(config, "spillway dead-letters") as bus:
        letters = await newest_dead_letters(bus, limit)
    if as_json:
        out.print_json(data=[_facts(letter) for letter in letters])
    elif letters:
        columns = ("failed (UTC)", "request", "model", "tenant", "attempts", "reasons")
        print_table(columns, map(_letter_cells, letters))
    else:
        out.print("no dead letters")


@command
async def parked(
    *,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Maximum number, oldest first.")] = 20,
    again: Annotated[bool, typer.Option("--replay", help="Send the records to the ledger writers again.")] = False,
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """List usage records that could not be decoded or that the database rejected.

    The queue server must be running. A record from a newer release is parked until a ledger writer of that release
    replays it automatically. A record that fails again after --replay is parked again.
    """
    found: list[ParkedUsage] = []
    async with queue_server(config, "spillway parked") as bus:
        async for sequence, record in parked_records(bus):
            if again:
                await replay(bus, sequence, record)
            found.append(record)
            if len(found) == limit:
                break
    if as_json:
        out.print_json(data=[_parked_facts(record, replayed=again) for record in found])
        return
    if found:
        rows = ((_utc(record.parked_unix_ms), _summary(record), record.reason) for record in found)
        print_table(("parked (UTC)", "record", "reason"), rows)
    out.print(
        f"{len(found) or 'no'} records parked" + (", sent to the ledger writers again" if again and found else "")
    )


def _parked_facts(record: ParkedUsage, *, replayed: bool) -> dict[str, Any]:
    summary, reason = _summary(record), record.reason
    return {"parked_unix_ms": record.parked_unix_ms, "record": summary, "reason": reason, "replayed": replayed}


def _facts(letter: DeadLetter) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(letter)
    # Defaults are omitted on the wire; scripts expect every field.
    facts["failures"] = [msgspec.structs.asdict(failure) for failure in letter.failures]
    return facts


def _letter_cells(letter: DeadLetter) -> tuple[str, ...]:
    attempts, reasons = str(len(letter.failures)), counted_codes(letter.failures)
    return (_utc(letter.given_up_unix_ms), letter.request_id, letter.model, letter.tenant, attempts, reasons)


def _summary(record: ParkedUsage) -> str:
    """Describe a record from the fields that every release has."""
    try:
        fields: Any = msgspec.msgpack.decode(record.message)[0]
        return f"{fields['type']} {fields['request_id']} of {fields.get('key_id', 'unknown')} (protocol {fields['v']})"
    except (*UNDECODABLE, LookupError, TypeError):
        return f"{len(record.message)} bytes"


def _utc(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
