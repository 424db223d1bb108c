"""``spillway audit`` and ``spillway admin``: the audit log, and the password of the pages."""

import json
import sys
from datetime import datetime
from typing import Annotated

import typer

from console.admin.views import audit_view
from console.login.admins import ADMIN_NAME, set_password
from console.login.passwords import new_password
from db.accounts.audit import MAX_PAGE_ROWS, AuditEntry, AuditFilter, list_changes
from spillway.cli.connections import database
from spillway.cli.context import ConfigOption, DataOption, out, run_async, running_or_config
from spillway.cli.keys import JsonOption, print_table
from spillway.cli.policy import local_time, this_actor


def audit(
    subject: Annotated[str | None, typer.Option(help="Only changes of this id (key_…, team_…, org_…).")] = None,
    actor: Annotated[str | None, typer.Option(help="Only by this actor: cli:NAME, user:NAME, key:ID, system.")] = None,
    since: Annotated[datetime | None, typer.Option(help="From this local time on.")] = None,
    until: Annotated[datetime | None, typer.Option(help="Before this local time.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=MAX_PAGE_ROWS, help="Maximum number.")] = 50,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Show changes to organisations, teams and keys with their actors, newest first."""
    resolved = running_or_config(config, data)

    async def main() -> None:
        audit_filter = AuditFilter(subject, actor, _unix_ms(since), _unix_ms(until))
        async with database(resolved) as engine:
            entries = await list_changes(engine, audit_filter, limit)
        if as_json:
            out.print_json(json.dumps([audit_view(entry) for entry in entries]))
        else:
            print_table(("at", "actor", "action", "subject", "changes"), (_cells(entry) for entry in entries))

    run_async(main)


def password(
    stdin: Annotated[bool, typer.Option("--stdin", help="Read the password from standard input.")] = False,
    config: ConfigOption = None,
    data: DataOption = None,
) -> None:
    """Set a new password for the pages' local login (user `admin`) and print it. All its sessions end."""
    resolved = running_or_config(config, data)
    chosen = sys.stdin.readline().rstrip("\r\n") if stdin else new_password()

    async def main() -> None:
        async with database(resolved) as engine:
            await set_password(engine, chosen, this_actor())
        if stdin:
            out.print(f"the password of {ADMIN_NAME} is changed")
        else:
            out.print(chosen, markup=False)
            out.print(f"[dim]for user {ADMIN_NAME}: save it now, it cannot be shown again[/dim]")

    run_async(main)


def _cells(entry: AuditEntry) -> tuple[str, ...]:
    before, after = entry.before or {}, entry.after or {}
    fields = [
        f"{field}: {_text(before[field])} → {_text(value)}" if field in before else f"{field}: {_text(value)}"
        for field, value in after.items()
    ]
    return (local_time(entry.at_unix_ms), entry.actor, entry.action, entry.subject_id, ", ".join(fields))


def _text(value: object) -> str:
    return "none" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _unix_ms(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.astimezone().timestamp() * 1000)
