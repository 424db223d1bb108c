"""What is kept of one response, in whatever state it is, as its callers see it. Pure, and mostly left unparsed."""

from typing import Final, Literal

import msgspec

from gateway.api.openai_items import items_of
from gateway.errors import UnknownObject
from gateway.responses.records import EventsPart, Run, StoredResponse

FIRST_EVENTS: Final = 2  # which say that it is queued

_encode = msgspec.json.Encoder().encode


class State(msgspec.Struct, frozen=True):
    """The state of a response."""

    status: str
    background: bool


class _Identity(msgspec.Struct, frozen=True):
    id: str


_decode_state: Final = msgspec.json.Decoder(State).decode
_decode_identities: Final = msgspec.json.Decoder(list[_Identity]).decode


class ItemsPage(msgspec.Struct, frozen=True):
    """Some input items, each as it is stored."""

    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class Kept:
    """One response. Its methods raise MsgspecError where something else is stored."""

    def __init__(self, response: bytes, items: bytes, run: Run | None = None, last: EventsPart | None = None) -> None:
        self._response = response
        self._items = items
        self._run = run
        self._last = last

    @classmethod
    def of_run(cls, run: Run, last: EventsPart | None) -> "Kept":
        """Return one that is made in the background. ``last``: the last part of its events."""
        return cls(last.response if last is not None and last.is_last else run.response, b"", run, last)

    @classmethod
    def of_end(cls, stored: StoredResponse) -> "Kept":
        """Return one that has ended."""
        return cls(stored.response, stored.items)

    @property
    def is_over(self) -> bool:
        """True once nothing of it changes."""
        return self._run is None or (self._last is not None and self._last.is_last)

    @property
    def state(self) -> State:
        """Its state."""
        return _decode_state(self.answer)

    @property
    def answer(self) -> bytes:
        """The response as the API shows it: JSON."""
        has_begun = self._last is not None and self._last.first + self._last.count > FIRST_EVENTS
        if self.is_over or not has_begun:
            return self._response
        fields = msgspec.json.decode(self._response, type=dict[str, msgspec.Raw])
        return _encode({**fields, "status": "in_progress"})

    @property
    def items(self) -> bytes:
        """Its input items: JSON; empty where they were too large to be kept."""
        return self._items if self._run is None else items_of(self._run.body, answer_id_of(self._run.response_id))

    def page(self, after: str | None, limit: int, order: Literal["asc", "desc"]) -> bytes:
        """Return some of its input items: JSON. Raises UnknownObject where none has the id ``after``."""
        listed = self.items or b"[]"
        items = msgspec.json.decode(listed, type=list[msgspec.Raw])
        ids = [item.id for item in _decode_identities(listed)]
        if order == "desc":
            items.reverse()
            ids.reverse()
        begin = 0
        if after is not None:
            if after not in ids:
                raise UnknownObject(f"No input item with id '{after[:100]}'.", param="after")
            begin = ids.index(after) + 1
        end = min(begin + limit, len(ids))
        first, last = (ids[begin], ids[end - 1]) if end > begin else (None, None)
        return _encode(ItemsPage(items[begin:end], first, last, end < len(ids)))


def answer_id_of(response_id: str) -> str:
    """Return the id of the answer that a response is."""
    return response_id.removeprefix("resp_")
