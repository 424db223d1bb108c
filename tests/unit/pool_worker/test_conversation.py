"""Conversations for APIs in which user and assistant alternate (Anthropic, Bedrock, Vertex)."""

from typing import Any

import msgspec
import pytest

from engine.errors import RequestRejected
from pool_worker.engines.chat_formats.base import ChatServerRequest
from pool_worker.engines.chat_formats.conversation import alternate
from protocol.generation import SamplingParams
from protocol.job import Call, Chat, Turn

LATER = "<system>\n{}\n</system>"
CALLED = Turn("assistant", calls=(Call("c", "look", "{}"),))
RESULT = Turn("tool", "seen", call_id="c")


class Blocks:
    def text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def call(self, call: Call, arguments: msgspec.Raw) -> dict[str, Any]:
        return {"call": call.id, "arguments": bytes(arguments)}

    def result(self, call: Call, text: str) -> dict[str, Any]:
        return {"result": call.id, "text": text}


def asked(*turns: Turn) -> ChatServerRequest:
    return ChatServerRequest("m", Chat(turns), SamplingParams(), None, None)


def turns(roles: str) -> list[Turn]:
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    return [Turn(names[role], f"{number}") for number, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("roles", "system", "messages"),
    [
        ("sdu", ["0", "1"], [("user", ["2"])]),
        ("sus", ["0"], [("user", ["1", LATER.format(2)])]),
        ("uas", [], [("user", ["0"]), ("assistant", ["1"]), ("user", [LATER.format(2)])]),
        ("udau", [], [("user", ["0", LATER.format(1)]), ("assistant", ["2"]), ("user", ["3"])]),
        ("sd", [], [("user", ["0", "1"])]),
    ],
)
def test_system_messages_may_be_anywhere(roles: str, system: list[str], messages: list[tuple[str, list[str]]]) -> None:
    """Regression: a coding agent's reminder in the middle of a conversation was refused with a 400."""
    found = alternate(asked(*turns(roles)), Blocks())
    assert found.system == system
    assert [(role, [block["text"] for block in blocks]) for role, blocks in found.messages] == messages


def test_a_result_directly_follows_its_call() -> None:
    found = alternate(asked(Turn("user", "0"), CALLED, Turn("system", "now"), RESULT, Turn("user", "1")), Blocks())
    assert [role for role, _ in found.messages] == ["user", "assistant", "user"]
    assert [block["text"] for block in found.messages[2][1]] == ["seen", LATER.format("now"), "1"]


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(RequestRejected):
        alternate(asked(Turn("system", "")), Blocks())
