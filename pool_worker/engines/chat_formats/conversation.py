"""Conversations for APIs in which user and assistant alternate, and messages are blocks: texts, calls and results.

System messages at the beginning are kept separately; later ones become user messages in place. Anything that such an
API could not represent is refused with its name.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import msgspec

from engine.errors import RequestRejected
from pool_worker.engines.chat_formats.base import ChatServerRequest
from pool_worker.engines.framing import MalformedEvent
from protocol.job import Call, Turn
from protocol.wire import UNDECODABLE

Block = dict[str, Any]
Role = Literal["user", "assistant"]

_SYSTEM_ROLES: Final = frozenset({"system", "developer"})
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Blocks(Protocol):
    """Builds the blocks of one API's messages."""

    def text(self, text: str) -> Block:
        """Build a block of non-empty text."""
        ...

    def call(self, call: Call, arguments: msgspec.Raw) -> Block:
        """Build a tool call; its arguments are a JSON object."""
        ...

    def result(self, call: Call, text: str) -> Block:
        """Build the result of a tool call."""
        ...


@dataclass(slots=True)
class Conversation:
    """A conversation whose neighboring messages have different roles, each with at least one block."""

    system: list[str] = field(default_factory=list)
    messages: list[tuple[Role, list[Block]]] = field(default_factory=list)
    called: dict[str, Call] = field(default_factory=dict)  # by id


def alternate(ask: ChatServerRequest, blocks: Blocks) -> Conversation:
    """Build a conversation that ends with the partial answer, if any. Raises RequestRejected."""
    turns = list(ask.chat.turns)
    if ask.chat.continues_last:
        turns.pop()
    elif turns[-1].role == "assistant":
        raise RequestRejected("messages", "this pool's API would continue an assistant message at the end")
    conversation = Conversation()
    for turn in _later_systems_as_user(turns):
        _take(conversation, turn, blocks)
    if not conversation.messages and conversation.system:  # the API requires a user message
        _add(conversation, "user", [blocks.text(text) for text in conversation.system])
        conversation.system = []
    if not conversation.messages:
        raise RequestRejected("messages", "this pool's API requires a user message")
    said = _partial_answer(ask).rstrip()
    if said:
        _add(conversation, "assistant", [blocks.text(said)])
    return conversation


def _later_systems_as_user(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Yield system messages after the beginning as user messages: the API takes no system messages there.

    A tool result must directly follow its call, so messages between the two are moved behind it.
    """
    has_begun = False
    waiting: list[Turn] = []
    for turn in turns:
        if turn.role in _SYSTEM_ROLES and has_begun:
            if turn.content:
                waiting.append(Turn("user", f"<system>\n{turn.content}\n</system>"))
            continue
        has_begun |= turn.role not in _SYSTEM_ROLES
        if turn.role != "tool":
            yield from waiting
            waiting.clear()
        yield turn
    yield from waiting


def trailing_whitespace(ask: ChatServerRequest) -> str:
    """Return the trailing whitespace of the partial answer, which no API takes at the end of a message."""
    partial = _partial_answer(ask)
    return partial[len(partial.rstrip()) :]


def _partial_answer(ask: ChatServerRequest) -> str:
    before = ask.chat.turns[-1].content or "" if ask.chat.continues_last else ""
    return before + ask.prefix


def _take(conversation: Conversation, turn: Turn, blocks: Blocks) -> None:
    if turn.name is not None and turn.role != "tool":
        raise RequestRejected("messages", "this pool's API does not support 'name' in a message")
    text = turn.content or ""
    if turn.role in _SYSTEM_ROLES:
        conversation.system += [text] if text else []
    elif turn.role == "tool":
        call = conversation.called.get(turn.call_id or "")
        if call is None:
            raise RequestRejected("messages", f"a result for the unknown call {turn.call_id!r}")
        _add(conversation, "user", [blocks.result(call, text)])
    else:
        conversation.called |= {call.id: call for call in turn.calls}
        said = [blocks.text(text)] if text else []
        said += [blocks.call(call, _arguments(call)) for call in turn.calls]
        if not said:
            raise RequestRejected("messages", "this pool's API does not support empty messages")
        _add(conversation, "assistant" if turn.role == "assistant" else "user", said)


def _add(conversation: Conversation, role: Role, said: Sequence[Block]) -> None:
    if conversation.messages and conversation.messages[-1][0] == role:
        conversation.messages[-1][1].extend(said)
    else:
        conversation.messages.append((role, list(said)))


def _arguments(call: Call) -> msgspec.Raw:
    try:
        _decode(call.arguments or "{}")
    except UNDECODABLE as error:
        raise RequestRejected("messages", f"the arguments of the call {call.id!r} are not a JSON object") from error
    return msgspec.Raw((call.arguments or "{}").encode())


def schema_of(parameters: str | None) -> msgspec.Raw:
    """Return the schema of a tool's arguments; by default, any object."""
    return msgspec.Raw((parameters or '{"type":"object","properties":{}}').encode())


class Overlap:
    """Removes the beginning of an answer that the client already has."""

    def __init__(self, text: str) -> None:
        """Expect ``text`` before new text."""
        self._text = text

    def cut(self, text: str) -> str:
        """Return the new text. Raises MalformedEvent if the answer begins differently."""
        known = min(len(text), len(self._text))
        if text[:known] != self._text[:known]:
            raise MalformedEvent("the answer does not continue the given message")
        self._text = self._text[known:]
        return text[known:]
