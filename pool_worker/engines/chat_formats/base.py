"""The interface of wire formats for messages: requests to continue a conversation, and their answers.

One file per format in this folder, one registry in ``__init__``, and one conformance suite that all must pass
(``tests/conformance/test_chat_engines.py``). A format is pure: it builds bodies and reads events.
``pool_worker.engines.server_connection`` handles the connection, its limits and its faults. A ``Framing`` splits the
body into events and yields each as a JSON object, even for binary streams (AWS' event streams).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
from msgspec.structs import replace
from pydantic import SecretStr

from engine.errors import RequestRejected
from pool_worker.engines.formats.base import MAX_COUNT
from pool_worker.engines.framing import Framing, MalformedEvent
from pool_worker.engines.reported_ends import EndReason
from protocol.generation import SamplingParams
from protocol.http_client import httpx
from protocol.job import DROPPABLE, THINKING, Chat, ChatUsage, Part

# Handled here for every format: one stream per choice, which ends at a stop string, and the maximum length in the body.
DONE_HERE: Final = frozenset({"n", "max_tokens", "stop", "include_stop_str_in_output"})
# Meaningless without token ids, or already expressed by the conversation.
WITHOUT_MEANING: Final = frozenset({"skip_special_tokens", "grammar"})

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]  # maximum that an API may report

_Counts = TypeVar("_Counts", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class ChatServerRequest:
    """A request to a server for one choice."""

    model: str  # as the server calls it
    chat: Chat
    params: SamplingParams
    max_tokens: int | None  # output tokens still allowed; None: the caller set no limit
    seed: int | None  # of this choice
    prefix: str = ""  # the answer so far, to be continued without repetition
    cache_salt: str = ""  # of the tenant, for servers that take one; empty: none


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """The content of one event."""

    parts: Sequence[Part] = ()
    ended_by: EndReason | None = None  # no part follows, but usage may. Tool calls end with "stop"
    usage: ChatUsage | None = None  # of the whole choice so far: the last one counts


class AnswerReader(Protocol):
    """Reads the events of one stream, in order. Stateful."""

    def read(self, event: Mapping[str, Any]) -> ChatDelta:
        """Read one event. Raises MalformedEvent or ServerFailure."""
        ...

    def done(self) -> ChatDelta:
        """Return the rest of the answer when the server signals its end. Raises MalformedEvent."""
        ...


class ChatFormat(Protocol):
    """The wire format of one API."""

    framing: Framing  # a key of FRAMINGS
    health_path: str | None  # GET; None: no health page, only answers show its health
    # Key of ``formats.FORMATS``, for its page of facts; None: a hosted API, which takes the model's name.
    server: str | None
    honoured: frozenset[str]  # supported fields of SamplingParams besides DONE_HERE
    schemas: frozenset[str]  # which of "json_object" and "json_schema" it supports
    max_temperature: float  # maximum
    efforts: Sequence[str] | None  # supported values of ``reasoning_effort``; None: any
    thinking: Collection[bool]  # whether reasoning can be switched on and off
    takes_tools: bool
    continues: bool  # it continues an assistant message (``ChatServerRequest.prefix``) without repeating it

    def auth(self) -> httpx.Auth | None:
        """Return the signer of every request; None: the API key in the settings is sent as a bearer token."""
        ...

    def http_status(self, status: int, headers: Mapping[str, str], text: str) -> int:
        """Return the HTTP status that an error stands for, if the API reports it with another."""
        ...

    def path(self, ask: ChatServerRequest) -> str:
        """Return the path to post to, relative to the settings' URL."""
        ...

    def body(self, ask: ChatServerRequest) -> dict[str, Any]:
        """Build the body of a streaming request."""
        ...

    def reader(self, ask: ChatServerRequest) -> AnswerReader:
        """Return a reader of the answer to one request."""
        ...


class HeaderAuth(httpx.Auth):
    """An API key in a custom header."""

    def __init__(self, name: str, key: SecretStr) -> None:
        """Send ``key`` as the header ``name``."""
        self._name = name
        self._key = key

    def auth_flow(self, request: httpx.Request) -> Any:  # noqa: ANN401  # httpx' own generator type
        """Add the key to the request."""
        request.headers[self._name] = self._key.get_secret_value()
        yield request


def refuse_unknown(chat: Chat, params: SamplingParams, chat_format: ChatFormat) -> None:
    """Raise RequestRejected for the first unsupported field or value: nothing is dropped silently."""
    for name, reason in _not_honoured(chat, params, chat_format):
        raise RequestRejected(name, reason)
    if chat.tools and not chat_format.takes_tools:
        raise RequestRejected("tools", "this pool's API does not support tools")
    if chat.schema is not None:
        kind = "json_object" if chat.schema.schema is None else "json_schema"
        if kind not in chat_format.schemas:
            raise RequestRejected("response_format", f"this pool's API does not support {kind}")


def without_unsupported(
    chat: Chat, params: SamplingParams, chat_format: ChatFormat
) -> tuple[Chat, SamplingParams, tuple[str, ...]]:
    """Drop unsupported fields that do not affect the answer's form; return their names too."""
    names = [name for name, _ in _not_honoured(chat, params, chat_format) if name in DROPPABLE]
    unset = {name: getattr(_UNSET, name) for name in names if hasattr(_UNSET, name)}
    unsaid = {_OF_CHAT[name]: None for name in names if name in _OF_CHAT}
    return replace(chat, **unsaid), replace(params, **unset), tuple(names)


def _not_honoured(chat: Chat, params: SamplingParams, chat_format: ChatFormat) -> Iterator[tuple[str, str]]:
    """Yield each unsupported field of the request, and why it is refused."""
    known = {*DONE_HERE, *WITHOUT_MEANING, *chat_format.honoured}
    for name in SamplingParams.__struct_fields__:
        if name not in known and getattr(params, name) != getattr(_UNSET, name):
            yield name, _lacks(name)
    if "temperature" in known and params.temperature > chat_format.max_temperature:
        yield "temperature", f"this pool's API supports a 'temperature' of at most {chat_format.max_temperature:g}"
    effort, efforts = chat.reasoning_effort, chat_format.efforts
    if effort is not None and efforts is not None and effort not in efforts:
        name = "reasoning_effort"
        yield name, f"this pool's API supports as '{name}': {', '.join(efforts)}" if efforts else _lacks(name)
    if chat.thinks is not None and chat.thinks not in chat_format.thinking:
        yield THINKING, _lacks(THINKING)


def _lacks(name: str) -> str:
    return f"this pool's API does not support '{name}'"


def sampling(ask: ChatServerRequest, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the parameters that the caller set, under the API's names; the API's defaults apply to the rest."""
    fields: dict[str, Any] = {}
    for name, api_name in names.items():
        value = ask.seed if name == "seed" else getattr(ask.params, name)
        if value != getattr(_UNSET, name):
            fields[api_name] = list(value) if isinstance(value, tuple) else value
    return fields


_UNSET: Final = SamplingParams()
_OF_CHAT: Final = {"reasoning_effort": "reasoning_effort", THINKING: "thinks"}  # fields of Chat


def refuse_continuation(ask: ChatServerRequest, chat_format: ChatFormat) -> None:
    """Raise RequestRejected if an answer must be continued and the API cannot do that."""
    if (ask.chat.continues_last or ask.prefix) and not chat_format.continues:
        raise RequestRejected("continue_final_message", _lacks("continue_final_message"))


def read_event(event: Mapping[str, Any], kind: type[_Counts]) -> _Counts:
    """Decode an event as the API documents it. Raises MalformedEvent."""
    try:
        return msgspec.convert(event, kind)
    except msgspec.ValidationError as error:
        raise MalformedEvent(str(error)) from error


def read_counts(reported: object, kind: type[_Counts]) -> _Counts | None:
    """Return the reported token counts; None if they are implausible, so that they are estimated."""
    try:
        return msgspec.convert(reported, kind)
    except msgspec.ValidationError:
        return None
