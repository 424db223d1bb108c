"""The pages of the audit log and of webhooks."""

from typing import Any, Final

from fastapi import APIRouter, Request
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import Response

from console.dashboard.audit_words import in_words
from console.dashboard.shell import Pages
from console.dashboard.view import View
from console.rules import person_of
from db.accounts.audit import AuditFilter, list_changes
from ledger.queries.names import load_names

PAGE_ROWS: Final = 100


def add_audit_pages(router: APIRouter, pages: Pages) -> None:
    """Register the pages."""

    @router.get("/audit")
    async def show_audit(request: Request, actor: str = "", subject: str = "", after: str = "") -> Response:
        seen = await pages.admin.audited_subjects(person_of(request))
        wanted = AuditFilter(subject or None, actor or None, after_id=after or None, subject_ids=seen)
        found = await list_changes(pages.gateway.database, wanted, PAGE_ROWS + 1)
        entries = found[:PAGE_ROWS]

        async def ask(connection: AsyncConnection, view: View) -> dict[str, Any]:
            names = await load_names(connection, view.teams)
            return {"page": "Audit", "entries": [in_words(entry, names, view) for entry in entries]}

        older = entries[-1].id if len(found) > PAGE_ROWS else None
        return await pages.show(request, "audit.html", ask, actor=actor, subject=subject, after=after, older=older)

    @router.get("/webhooks")
    async def show_webhooks(request: Request) -> Response:
        endpoints = await pages.admin.list_webhooks(person_of(request))
        return await pages.show_memory(request, "webhooks.html", {"page": "Webhooks", "endpoints": endpoints})
