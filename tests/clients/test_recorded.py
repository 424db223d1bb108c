"""The last request of a task as each coding agent has sent it, long texts shortened: taken as it is, and answered.

The agents themselves are half a gigabyte: ``make agents`` has them.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.asked import ANSWER
from tests.player.system import PlayedSystem
from tests.waiting import HANGS_S

FOLDER = Path(__file__).with_name("recorded")
TASK = "TASK"  # stands in for what the agent was asked to do
PIECES = {  # of the answer in an event of each endpoint
    "chat/completions": lambda event: (event["choices"] or [{"delta": {}}])[0]["delta"].get("content"),
    "messages": lambda event: event.get("delta", {}).get("text"),
    "responses": lambda event: event["delta"] if event["type"] == "response.output_text.delta" else None,
}


def answer(spillway: PlayedSystem, name: str, says: str) -> str:
    """The text that is streamed to a recorded request whose task is a play of one turn."""
    recorded: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    body = json.dumps({**recorded["body"], "model": spillway.model}).replace(TASK, spillway.play({"say": says}))
    headers = {**recorded["headers"], "authorization": f"Bearer {spillway.api_key}"}
    done = httpx.post(f"{spillway.url}{recorded['path']}", content=body, headers=headers, timeout=HANGS_S)
    assert done.status_code == httpx.codes.OK, done.text
    events = [line.removeprefix("data: ") for line in done.text.splitlines() if line.startswith("data: ")]
    piece = next(piece for endpoint, piece in PIECES.items() if endpoint in recorded["path"])
    return "".join(piece(json.loads(event)) or "" for event in events if event != "[DONE]")


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.json")))
def test_what_agents_send_is_answered(spillway: PlayedSystem, name: str) -> None:
    says = '{"title": "A greeting"}' if name.endswith("-title") else ANSWER
    assert answer(spillway, name, says) == says
