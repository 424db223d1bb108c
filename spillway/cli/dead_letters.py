"""``spillway dead-letters``: requests that were given up after their last attempt, and why."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gateway.dispatch.attempt import counted_codes
from gateway.dispatch.records import newest_dead_letters
from protocol.usage import DeadLetter
from spillway.cli.connections import queue_server
from spillway.cli.context import ResolvedConfig, command, out

TABLE_WIDTH_CHARS: Final = 140


class Format(StrEnum):
    """The output format of dead letters."""

    TABLE = "table"
    JSON = "json"


@command
async def dead_letters(
    *,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Maximum number, newest first.")] = 20,
    output: Annotated[Format, typer.Option("--format", "-f", help="Output format.")] = Format.TABLE,
    config: ResolvedConfig,
) -> None:
    """List requests that failed on every worker that tried them, with each attempt's reason.

    Prompts and answers are not stored. A dead letter is kept for 30 days. The queue server must be running. The table
    counts each request's attempts by error code; JSON has every attempt with its worker, reason and tokens.
    """
    async with queue_server(config, "spillway dead-letters") as bus:
        letters = await newest_dead_letters(bus, limit)
    _print(letters, output)


def _print(letters: Sequence[DeadLetter], output: Format) -> None:
    if output is Format.JSON:
        out.print_json(json.dumps([_facts(letter) for letter in letters]))
    elif not letters:
        out.print("no dead letters")
    else:
        # A pipe has no width, and wrapping by a narrow terminal is better than truncation by rich.
        Console(width=max(out.width, TABLE_WIDTH_CHARS)).print(_table(letters))


def _facts(letter: DeadLetter) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(letter)
    # Defaults are omitted on the wire; scripts expect every field.
    facts["failures"] = [msgspec.structs.asdict(failure) for failure in letter.failures]
    return facts


def _table(letters: Sequence[DeadLetter]) -> Table:
    table = Table("given up (UTC)", "request", "model", "tenant", "attempts", "reasons", box=SIMPLE_HEAD)
    for letter in letters:
        given_up = datetime.fromtimestamp(letter.given_up_unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
        row = (
            given_up,
            letter.request_id,
            letter.model,
            letter.tenant,
            str(len(letter.failures)),
            counted_codes(letter.failures),
        )
        table.add_row(*row)
    return table
