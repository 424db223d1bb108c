"""The page of sessions: who is logged in, from where, and ending a session on all gateways."""

from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from console.dashboard.shell import Pages
from console.rules import person_of
from db.accounts.roles import reach_of

PATH: Final = "/dashboard/sessions"


def add_session_pages(router: APIRouter, pages: Pages) -> None:
    """Register the page and its form."""

    def whose(request: Request) -> str | None:
        """Return the user whose sessions are listed; None: all users'."""
        own = pages.user(request)
        return None if reach_of(own.role, "end_sessions") == "all" else own.user

    @router.get("/sessions")
    async def show_sessions(request: Request) -> Response:
        running = await pages.sessions.running(whose(request))
        teams = {team.team_id: team.name for team in await pages.admin.list_teams(person_of(request))}
        return await pages.show_memory(
            request, "sessions.html", {"page": "Sessions", "sessions": running, "team_names": teams}
        )

    @router.post("/sessions/{session_id}/end")
    async def end_session(request: Request, session_id: str) -> Response:
        await pages.sessions.end_by_id(session_id, pages.user(request).actor, whose(request))
        return RedirectResponse(PATH, 303)
