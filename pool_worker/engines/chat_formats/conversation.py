"""A conversation as APIs take it in which user and assistant alternate, and say blocks: texts, calls, their results.

System messages at the beginning stand beside it; later ones become text of the user, where they stand. What such an API
could not tell apart is refused by name.
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
    """One API's form of the blocks of a message."""

    def text(self, text: str) -> Block:
        """Write a text, which is not empty."""
        ...

    def call(self, call: Call, arguments: msgspec.Raw) -> Block:
        """Write a call, whose arguments are a JSON object."""
        ...

    def result(self, call: Call, text: str) -> Block:
        """Write what a call resulted in."""
        ...


@dataclass(slots=True)
class Conversation:
    """A conversation in which neighbouring messages have different roles, and each has at least one block."""

    system: list[str] = field(default_factory=list)
    messages: list[tuple[Role, list[Block]]] = field(default_factory=list)
    called: dict[str, Call] = field(default_factory=dict)  # by their ids


def alternate(ask: ChatServerRequest, blocks: Blocks) -> Conversation:
    """Write a conversation, the begun answer at its end. Raises RequestRejected."""
    turns = list(ask.chat.turns)
    if ask.chat.continues_last:
        turns.pop()
    elif turns[-1].role == "assistant":
        raise RequestRejected("messages", "this pool's API would go on with the assistant's message at the end")
    conversation = Conversation()
    for turn in _later_systems_as_user(turns):
        _take(conversation, turn, blocks)
    if not conversation.messages and conversation.system:  # which needs a message of the user
        _add(conversation, "user", [blocks.text(text) for text in conversation.system])
        conversation.system = []
    if not conversation.messages:
        raise RequestRejected("messages", "this pool's API needs a message of the user")
    said = _begun(ask).rstrip()
    if said:
        _add(conversation, "assistant", [blocks.text(said)])
    return conversation


def _later_systems_as_user(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Yield system messages after the beginning as the user's: the API takes none there.

    The result of a call must follow it: what stands between them comes after it.
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


def owed(ask: ChatServerRequest) -> str:
    """Return the blanks at the end of what the client has of the answer: no API takes them there."""
    begun = _begun(ask)
    return begun[len(begun.rstrip()) :]


def _begun(ask: ChatServerRequest) -> str:
    before = ask.chat.turns[-1].content or "" if ask.chat.continues_last else ""
    return before + ask.prefix


def _take(conversation: Conversation, turn: Turn, blocks: Blocks) -> None:
    if turn.name is not None and turn.role != "tool":
        raise RequestRejected("messages", "this pool's API takes no 'name' in a message")
    text = turn.content or ""
    if turn.role in _SYSTEM_ROLES:
        conversation.system += [text] if text else []
    elif turn.role == "tool":
        call = conversation.called.get(turn.call_id or "")
        if call is None:
            raise RequestRejected("messages", f"a result of a call that was not made, {turn.call_id!r}")
        _add(conversation, "user", [blocks.result(call, text)])
    else:
        conversation.called |= {call.id: call for call in turn.calls}
        said = [blocks.text(text)] if text else []
        said += [blocks.call(call, _arguments(call)) for call in turn.calls]
        if not said:
            raise RequestRejected("messages", "this pool's API takes no empty message")
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
        raise RequestRejected("messages", f"the arguments of the call {call.id!r} are no JSON object") from error
    return msgspec.Raw((call.arguments or "{}").encode())


def schema_of(parameters: str | None) -> msgspec.Raw:
    """Return the schema of a tool's arguments, where it has none that of any object."""
    return msgspec.Raw((parameters or '{"type":"object","properties":{}}').encode())


class Overlap:
    """The beginning of an answer that the client has already."""

    def __init__(self, text: str) -> None:
        """Expect ``text`` before anything new."""
        self._text = text

    def cut(self, text: str) -> str:
        """Return what is new. Raises MalformedEvent where the answer does not begin so."""
        known = min(len(text), len(self._text))
        if text[:known] != self._text[:known]:
            raise MalformedEvent("the answer does not go on with the message it was given")
        self._text = self._text[known:]
        return text[known:]
