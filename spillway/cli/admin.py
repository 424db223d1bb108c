"""``spillway audit`` and ``spillway admin``: the audit log, and the password of the pages."""

import sys
from datetime import datetime
from typing import Annotated, Final

import typer

from console.admin.views import audit_view
from console.login.admins import ADMIN_NAME, set_password
from console.login.passwords import new_password
from db.accounts.audit import MAX_PAGE_ROWS, AuditEntry, AuditFilter, list_changes
from spillway.cli.connections import database
from spillway.cli.context import ResolvedConfig, command, out, this_actor, unix_ms_of
from spillway.cli.output import JsonOption, local_time, print_objects


@command
async def audit(
    *,
    subject: Annotated[str | None, typer.Option(help="Only changes to this id (key_…, team_…, org_…).")] = None,
    actor: Annotated[
        str | None, typer.Option(help="Only changes by this actor: cli:NAME, user:NAME, key:ID, system.")
    ] = None,
    since: Annotated[datetime | None, typer.Option(help="From this local time.")] = None,
    until: Annotated[datetime | None, typer.Option(help="Before this local time.")] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=MAX_PAGE_ROWS, help="Maximum number of changes.")
    ] = 50,
    as_json: JsonOption = False,
    config: ResolvedConfig,
) -> None:
    """Show changes to organizations, teams and keys with their actors, newest first."""
    audit_filter = AuditFilter(subject, actor, unix_ms_of(since), unix_ms_of(until))
    async with database(config) as engine:
        entries = await list_changes(engine, audit_filter, limit)
    print_objects(entries, audit_view, _COLUMNS, as_json=as_json)


@command
async def password(
    *,
    stdin: Annotated[bool, typer.Option("--stdin", help="Read the password from standard input.")] = False,
    config: ResolvedConfig,
) -> None:
    """Set and print a new password for the local login (user `admin`). All its sessions end."""
    chosen = sys.stdin.readline().rstrip("\r\n") if stdin else new_password()
    async with database(config) as engine:
        await set_password(engine, chosen, this_actor())
    if stdin:
        out.print(f"changed the password of {ADMIN_NAME}")
    else:
        out.print(chosen, markup=False)
        out.print(f"[dim]user {ADMIN_NAME}: save the password now; it cannot be shown again[/dim]")


def _changed_fields(entry: AuditEntry) -> str:
    before, after = entry.before or {}, entry.after or {}
    return ", ".join(
        f"{field}: {_text(before[field])} → {_text(value)}" if field in before else f"{field}: {_text(value)}"
        for field, value in after.items()
    )


def _text(value: object) -> str:
    return "none" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


_COLUMNS: Final = {
    "at": lambda entry: local_time(entry.at_unix_ms),
    "actor": lambda entry: entry.actor,
    "action": lambda entry: entry.action,
    "subject": lambda entry: entry.subject_id,
    "changes": _changed_fields,
}
