"""The playground, and how to call the API: a conversation by a key of the user's own, shown as curl and as Python.

Requests of the playground are ordinary requests of a key: they use the public API, count toward the limits of the
user's team, and are in the log. The key expires with the session, and the page keeps it in memory only.
"""

import json
import shlex

from fastapi import APIRouter, Request
from starlette.responses import Response

from console.admin.routes import principal_answer
from console.dashboard.shell import Pages
from console.login.forms import read_form
from console.rules import person_of
from db.accounts.errors import PrincipalError
from gateway.errors import Refused
from gateway.http.pages import error_answer, json_answer


def add_playground(router: APIRouter, pages: Pages) -> None:
    """Register the page, and the route that issues its key."""

    @router.get("/playground")
    async def show_playground(request: Request) -> Response:
        who = person_of(request)
        teams = [team for team in await pages.admin.list_teams(who) if who.may("use_playground", team.team_id)]
        values = {"page": "Playground", "models": pages.live.models(), "teams": teams}
        return await pages.show_memory(request, "playground.html", {**values, "endpoint": pages.endpoint(request)})

    @router.post("/playground/key")
    async def make_playground_key(request: Request) -> Response:
        team = (await read_form(request)).get("team", "")
        try:
            _, token = await pages.admin.playground_key(team, pages.user(request))
        except PrincipalError as error:
            return error_answer(principal_answer(error))
        except Refused as error:
            return error_answer(error)
        return json_answer({"token": token})


def calls(endpoint: str, model: str) -> dict[str, str]:
    """Return a first request in curl and in Python; ``endpoint`` is the address of the API with its ``/v1``."""
    messages = [{"role": "user", "content": "Hello"}]
    body = shlex.quote(json.dumps({"model": model, "messages": messages}, ensure_ascii=False))
    return {
        "curl": f"""curl {shlex.quote(endpoint + "/chat/completions")} \\
  -H "Authorization: Bearer $SPILLWAY_API_KEY" \\
  -H "Content-Type: application/json" \\
  -d {body}""",
        "Python": f"""import os
from openai import OpenAI

client = OpenAI(base_url={json.dumps(endpoint)}, api_key=os.environ["SPILLWAY_API_KEY"])
answer = client.chat.completions.create(
    model={json.dumps(model, ensure_ascii=False)},
    messages={json.dumps(messages)},
)
print(answer.choices[0].message.content)""",
    }
