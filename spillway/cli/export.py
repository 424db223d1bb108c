"""``spillway export``: training sets from payloads whose clients consented to this use."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from db.accounts.teams import means
from db.tables import ApiKeyRow, TeamRow
from ledger.payloads.errors import ExportError
from ledger.payloads.sealing import Sealer, parse_keys
from ledger.training.export import Exporter, ExportPlan
from ledger.training.formats import FORMATS
from ledger.training.rows import ExportFilter
from ledger.training.rules import MIN_EXAMPLES
from protocol.distribution import version
from protocol.nats.clock import unix_now_ms
from spillway.cli.connections import database
from spillway.cli.context import ResolvedConfig, command, err, out, this_actor, unix_ms_of


@command
async def finetune(
    *,
    folder: Annotated[Path, typer.Option("--out", help="The folder to create. An existing one is never overwritten.")],
    format_: Annotated[str, typer.Option("--format", "-f", help=f"One of: {', '.join(FORMATS)}.")] = "openai",
    model: Annotated[str | None, typer.Option(help="Only answers of this model.")] = None,
    team: Annotated[str | None, typer.Option(help="Only payloads of this team, by id or name.")] = None,
    key: Annotated[str | None, typer.Option(help="Only payloads of this API key, by id or name.")] = None,
    since: Annotated[datetime | None, typer.Option(help="From this local time.")] = None,
    until: Annotated[datetime | None, typer.Option(help="Before this local time. Default: now.")] = None,
    min_turns: Annotated[int, typer.Option(min=1, help="Minimum number of user messages in a conversation.")] = 1,
    split: Annotated[str, typer.Option(help="Shares of train, validation and test.")] = "0.9,0.05,0.05",
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    keep_failovers: Annotated[
        bool, typer.Option("--keep-failovers", help="Include answers that more than one worker generated.")
    ] = False,
    config: ResolvedConfig,
) -> None:
    """Write conversations as JSON lines for fine-tuning. Requires consent at the time of the request and now."""
    if format_ not in FORMATS:
        raise typer.BadParameter(f"choose from {', '.join(FORMATS)}", param_hint="--format")
    sealer = Sealer(parse_keys(config.payload_settings().key))
    async with database(config) as engine:
        export_filter = ExportFilter(
            until_unix_ms=unix_ms_of(until) or unix_now_ms(),
            since_unix_ms=unix_ms_of(since),
            model=model,
            team_id=await _find_id(engine, TeamRow, team),
            key_id=await _find_id(engine, ApiKeyRow, key),
        )
        plan = ExportPlan(export_filter, format_, min_turns, _shares(split), seed, keep_failovers, this_actor())
        with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=err) as progress:
            bar = progress.add_task("export")
            manifest = await Exporter(engine, sealer, plan, version()).write(
                folder, lambda done, total: progress.update(bar, completed=done, total=total)
            )
    _print(manifest, folder)


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(share) for share in text.split(","))
    except ValueError as error:
        raise ExportError(f"--split {text!r}: must be numbers, such as 0.9,0.05,0.05") from error


async def _find_id(engine: AsyncEngine, table: type[TeamRow | ApiKeyRow], reference: str | None) -> str | None:
    """Return the id of a team or key, given its id or name. Raises ExportError."""
    if reference is None:
        return None
    async with engine.connect() as connection:
        rows = (await connection.execute(select(table.id, table.name))).all()
    found = [str(row.id) for row in rows if means(reference, row.id, row.name)]
    if len(found) != 1:
        raise ExportError(f"{reference!r} matches {len(found)} ids or names; use an id")
    return found[0]


def _print(manifest: dict[str, Any], folder: Path) -> None:
    for name, file in manifest["files"].items():
        out.print(f"{folder / name}: {file['examples']} examples", markup=False, soft_wrap=True)
    skipped = ", ".join(f"{count} {reason}" for reason, count in manifest["left_out"].items())
    out.print(f"{manifest['rows_read']} payloads read; skipped: {skipped or 'none'}", markup=False, soft_wrap=True)
    if (
        manifest["format"] == "openai"
        and manifest["files"].get("train.jsonl", {"examples": 0})["examples"] < MIN_EXAMPLES
    ):
        err.print(f"note: OpenAI requires files of at least {MIN_EXAMPLES} examples", style="yellow")
