"""The interface of wire formats of messages: requests to continue a conversation, and their answers.

One file a format in this folder, one registry in ``__init__``, and one conformance suite that all must pass
(``tests/conformance/test_chat_engines.py``). A format is pure: it makes bodies and reads events. The connection, its
limits and faults are ``pool_worker.engines.server_connection``'s; what cuts a body into events is a ``Framing``, which
yields the JSON object of each event, also where the wire is no text (AWS' event streams).
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

# What is done for every format: one stream a choice, which ends at a stop string, and a body that says how long the
# answer may be.
DONE_HERE: Final = frozenset({"n", "max_tokens", "stop", "include_stop_str_in_output"})
# What means nothing where no token ids come back, or what the conversation says itself.
WITHOUT_MEANING: Final = frozenset({"skip_special_tokens", "grammar"})

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]  # of tokens, as an API tells it

_Counts = TypeVar("_Counts", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class ChatServerRequest:
    """A request to a server for one choice."""

    model: str  # as the server calls it
    chat: Chat
    params: SamplingParams
    max_tokens: int | None  # output tokens, still to come; None: the caller has named no limit
    seed: int | None  # of this choice
    prefix: str = ""  # what the answer says already: to be gone on with, not to be repeated
    cache_salt: str = ""  # of the tenant, for a server that takes one; empty: none


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """The content of one event."""

    parts: Sequence[Part] = ()
    ended_by: EndReason | None = None  # no part follows; a usage may. Calls of tools end by "stop"
    usage: ChatUsage | None = None  # of the whole choice so far: what comes last counts


class AnswerReader(Protocol):
    """Reads the events of one stream, in order; knows what came before."""

    def read(self, event: Mapping[str, Any]) -> ChatDelta:
        """Read one event. Raises MalformedEvent or ServerFailure."""
        ...

    def done(self) -> ChatDelta:
        """Return what is left where the server says that this is all. Raises MalformedEvent."""
        ...


class ChatFormat(Protocol):
    """One API's way to be asked."""

    framing: Framing  # its name: of FRAMINGS
    health_path: str | None  # GET; None: it has none, and only answers tell
    # Whose page of facts it has, of ``formats.FORMATS``; None: a hosted API, asked by the model's name.
    server: str | None
    honoured: frozenset[str]  # the fields of SamplingParams that it honours, beside DONE_HERE
    schemas: frozenset[str]  # what of "json_object" and "json_schema" an answer can be made to follow
    max_temperature: float  # that it takes
    efforts: Sequence[str] | None  # that it takes as ``reasoning_effort``; None: any
    thinking: Collection[bool]  # whether it can be asked to reason, and not to
    takes_tools: bool
    continues: bool  # it continues with an assistant's message (``ChatServerRequest.prefix``) without repeating it

    def auth(self) -> httpx.Auth | None:
        """Return what signs every request; None: the settings' API key goes as a bearer token."""
        ...

    def meant(self, status: int, headers: Mapping[str, str], text: str) -> int:
        """Return the status that an error means by HTTP, where the API tells it by another."""
        ...

    def path(self, ask: ChatServerRequest) -> str:
        """Return where to post, relative to the settings' URL."""
        ...

    def body(self, ask: ChatServerRequest) -> dict[str, Any]:
        """Make the body of a request for a stream."""
        ...

    def reader(self, ask: ChatServerRequest) -> AnswerReader:
        """Return what reads the answer to one request."""
        ...


class HeaderAuth(httpx.Auth):
    """An API key in a header of its own."""

    def __init__(self, name: str, key: SecretStr) -> None:
        """Send ``key`` as the header ``name``."""
        self._name = name
        self._key = key

    def auth_flow(self, request: httpx.Request) -> Any:  # noqa: ANN401  # httpx' own generator type
        """Add the key to the request."""
        request.headers[self._name] = self._key.get_secret_value()
        yield request


def refuse_unknown(chat: Chat, params: SamplingParams, chat_format: ChatFormat) -> None:
    """Raise RequestRejected for the first thing asked for that would not be honoured: nothing is silently dropped."""
    for name, reason in _not_honoured(chat, params, chat_format):
        raise RequestRejected(name, reason)
    if chat.tools and not chat_format.takes_tools:
        raise RequestRejected("tools", "this pool's API does not take tools")
    if chat.schema is not None:
        kind = "json_object" if chat.schema.schema is None else "json_schema"
        if kind not in chat_format.schemas:
            raise RequestRejected("response_format", f"this pool's API cannot follow a {kind}")


def without_unsupported(
    chat: Chat, params: SamplingParams, chat_format: ChatFormat
) -> tuple[Chat, SamplingParams, tuple[str, ...]]:
    """Leave out what the API lacks and the answer's form does not depend on; return the names of that, too."""
    names = [name for name, _ in _not_honoured(chat, params, chat_format) if name in DROPPABLE]
    unset = {name: getattr(_UNSET, name) for name in names if hasattr(_UNSET, name)}
    unsaid = {_OF_CHAT[name]: None for name in names if name in _OF_CHAT}
    return replace(chat, **unsaid), replace(params, **unset), tuple(names)


def _not_honoured(chat: Chat, params: SamplingParams, chat_format: ChatFormat) -> Iterator[tuple[str, str]]:
    """Yield each field asked for that would not be honoured, and why not."""
    known = {*DONE_HERE, *WITHOUT_MEANING, *chat_format.honoured}
    for name in SamplingParams.__struct_fields__:
        if name not in known and getattr(params, name) != getattr(_UNSET, name):
            yield name, _lacks(name)
    if "temperature" in known and params.temperature > chat_format.max_temperature:
        yield "temperature", f"this pool's API takes a 'temperature' of at most {chat_format.max_temperature:g}"
    effort, efforts = chat.reasoning_effort, chat_format.efforts
    if effort is not None and efforts is not None and effort not in efforts:
        name = "reasoning_effort"
        yield name, f"this pool's API takes as '{name}' {', '.join(efforts)}" if efforts else _lacks(name)
    if chat.thinks is not None and chat.thinks not in chat_format.thinking:
        yield THINKING, _lacks(THINKING)


def _lacks(name: str) -> str:
    return f"this pool's API does not support '{name}'"


def sampling(ask: ChatServerRequest, names: Mapping[str, str]) -> dict[str, Any]:
    """Return what the caller has set, under an API's own names; what they have not is the API's own default."""
    fields: dict[str, Any] = {}
    for name, api_name in names.items():
        value = ask.seed if name == "seed" else getattr(ask.params, name)
        if value != getattr(_UNSET, name):
            fields[api_name] = list(value) if isinstance(value, tuple) else value
    return fields


_UNSET: Final = SamplingParams()
_OF_CHAT: Final = {"reasoning_effort": "reasoning_effort", THINKING: "thinks"}  # fields of Chat


def refuse_continuation(ask: ChatServerRequest, chat_format: ChatFormat) -> None:
    """Raise RequestRejected where an answer is begun, and the API does not go on with one."""
    if (ask.chat.continues_last or ask.prefix) and not chat_format.continues:
        raise RequestRejected("continue_final_message", _lacks("continue_final_message"))


def read_event(event: Mapping[str, Any], kind: type[_Counts]) -> _Counts:
    """Return an event as what the API's documents say of it. Raises MalformedEvent."""
    try:
        return msgspec.convert(event, kind)
    except msgspec.ValidationError as error:
        raise MalformedEvent(str(error)) from error


def read_counts(reported: object, kind: type[_Counts]) -> _Counts | None:
    """Return what the API says of tokens; None where that cannot be, so that it is estimated."""
    try:
        return msgspec.convert(reported, kind)
    except msgspec.ValidationError:
        return None
