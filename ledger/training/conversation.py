"""A payload as a conversation: the earlier messages, and the answer to be learned."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

HASH_BYTES: Final = 16
_MESSAGE_FIELDS: Final = ("role", "content", "name", "tool_calls", "tool_call_id")

Message = dict[str, Any]


class ExcludedFromExport(Exception):
    """The payload is excluded from the training set; the message is the reason counted in the manifest."""


class Conversation(Struct, frozen=True):
    """Messages as OpenAI has them; the last is the answer."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    parallel_tool_calls: bool | None
    endings: list[bytes]  # of each whole choice, the hash of everything up to its end

    @property
    def turns(self) -> int:
        """Number of the user's turns."""
        return sum(message["role"] == "user" for message in self.messages)


def conversation_of(request: Mapping[str, Any], choices: Sequence[Mapping[str, Any]]) -> Conversation:
    """Return the conversation of a stored chat, with its first complete choice. Raises ExcludedFromExport."""
    if "messages" not in request:
        raise ExcludedFromExport("not_a_chat")
    asked = [_plain(message) for message in request["messages"]]
    if asked[-1]["role"] not in {"user", "tool"}:
        raise ExcludedFromExport("goes_on_with_an_answer")  # the beginning of which is a part of the prompt
    whole = [choice for choice in choices if choice["finish_reason"] in {"stop", "tool_calls"}]
    if not whole:
        raise ExcludedFromExport("truncated")
    answers = [_plain(choice["message"]) for choice in whole]
    prompt = chain(asked)[-1]
    return Conversation(
        messages=[*asked, answers[0]],
        tools=request.get("tools") or [],
        parallel_tool_calls=request.get("parallel_tool_calls"),
        endings=[_extended(prompt, answer) for answer in answers],
    )


def _plain(message: Mapping[str, Any]) -> Message:
    """Return the message without fields outside the conversation, such as reasoning; "developer" becomes "system"."""
    plain = {name: message[name] for name in _MESSAGE_FIELDS if message.get(name) is not None}
    if plain["role"] == "developer":
        plain["role"] = "system"
    return plain


def chain(messages: Sequence[Message]) -> list[bytes]:
    """Return for each message the hash of everything up to its end, ignoring whitespace, case and call ids."""
    hashes, before = [], b""
    for message in messages:
        before = _extended(before, message)
        hashes.append(before)
    return hashes


def _extended(before: bytes, message: Message) -> bytes:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    said = [message["role"], " ".join(message.get("content", "").split()).casefold(), calls]
    return _hash(before + json.dumps(said).encode())


def prompt_hash(conversation: Conversation) -> bytes:
    """Return a hash that is equal for two payloads with the same prompt and the same tools."""
    tools = json.dumps(conversation.tools, sort_keys=True).encode()
    return _hash(chain(conversation.messages[:-1])[-1] + tools)


def beginnings(conversation: Conversation) -> list[bytes]:
    """Return the endings of the shorter conversations that this one continues."""
    hashes = chain(conversation.messages[:-1])
    return [after for after, said in zip(hashes, conversation.messages, strict=False) if said["role"] == "assistant"]


def root(conversation: Conversation) -> bytes:
    """Return the hash of everything up to the user's first message, which conversations with one beginning share."""
    hashes = chain(conversation.messages[:-1])
    first = next((at for at, said in enumerate(conversation.messages) if said["role"] == "user"), 0)
    return hashes[min(first, len(hashes) - 1)]


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:HASH_BYTES]
