"""The answer of one request, remembered while it is written: its texts, and the ids that its calls of tools got."""

from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import msgspec

from gateway.request.mailbox import Chunks
from protocol.job import Deltas, Part, Tokens

# In what begins a call, and tells its id. Never inside a JSON string, where its quotes would be escaped.
_CALLS: Final = b'"type":"function"'
_EVENT_START: Final = b"data: "
_EVENT_END: Final = b"\n\n"


class ChoiceEncoder(Protocol):
    """Encodes a choice's text as a call does."""

    def choice(self, text: str, finish_reason: str, parts: Sequence[Part] = ()) -> dict[str, Any]:
        """Return the choice object of a complete answer, without logprobs and token ids; ``parts`` follow its text."""
        ...


class RecordedAnswer:
    """Grows with the answer, up to ``max_chars``; from then on it is too large and holds nothing."""

    def __init__(self, choices: int, max_chars: int) -> None:
        self.is_too_large = False
        self._max_chars = self._room_chars = max_chars
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._parts: list[list[Part]] = [[] for _ in range(choices)]  # that came of pools which take messages
        self._finish_reasons: list[str | None] = [None] * choices
        self._calls: list[bytes] = []  # JSON that tells ids of calls

    @property
    def is_complete(self) -> bool:
        """True once every choice has ended."""
        return None not in self._finish_reasons

    @property
    def chars(self) -> int:
        """Number of characters held."""
        return 0 if self.is_too_large else self._max_chars - self._room_chars

    def add(self, frame: Tokens | Deltas) -> None:
        """Add what one step brought."""
        if isinstance(frame, Deltas):
            self._add(frame.index, "", frame.finish_reason, frame.parts)
        else:
            self._add(frame.index, frame.text, frame.finish_reason)

    def _add(self, index: int, text: str, finish_reason: str | None, parts: Sequence[Part] = ()) -> None:
        self._room_chars -= len(text) + sum(len(part.text) for part in parts)
        self._finish_reasons[index] = finish_reason
        if self._room_chars >= 0:
            self._texts[index].append(text)
            self._parts[index] += parts
        elif not self.is_too_large:
            self.is_too_large = True
            self._texts, self._parts = [[] for _ in self._texts], [[] for _ in self._parts]
            self._calls = []

    def add_events(self, events: bytes) -> None:
        """Add the events of a frame, for the ids in them."""
        if _CALLS in events and events.startswith(_EVENT_START) and not self.is_too_large:
            self._calls += [event.removeprefix(_EVENT_START) for event in events.split(_EVENT_END) if _CALLS in event]

    def add_whole(self, choices: Iterable[tuple[str, str | None, Sequence[Part]]], body: bytes) -> None:
        """Add an answer that is not streamed: its choices (``answers.ChoiceContent``) and its body."""
        for index, (text, finish_reason, parts) in enumerate(choices):
            self._add(index, text, finish_reason, parts)
        if _CALLS in body and b'"choices":[' in body:  # other APIs have other bodies
            self._calls.append(body)

    def choices(self, encoder: ChoiceEncoder) -> list[dict[str, Any]]:
        """The choices, once complete."""
        ids = self._call_ids()
        choices = []
        rows = zip(self._texts, self._finish_reasons, self._parts, strict=True)
        for index, (texts, finish_reason, parts) in enumerate(rows):
            choice = {"index": index, **encoder.choice("".join(texts), finish_reason or "", parts)}
            for place, call in enumerate(choice.get("message", {}).get("tool_calls", ())):
                call["id"] = ids.get((index, place), call["id"])
            choices.append(choice)
        return choices

    def _call_ids(self) -> dict[tuple[int, int], str]:
        """Ids that the client got, by choice and position."""
        ids = {}
        for reported in self._calls:
            for choice in msgspec.json.decode(reported)["choices"]:
                calls = (choice.get("delta") or choice["message"]).get("tool_calls", ())
                for place, call in enumerate(calls):
                    if "id" in call:
                        ids[choice["index"], call.get("index", place)] = call["id"]
        return ids


class RecordedChunks:
    """``Chunks`` that are recorded as they are sent."""

    def __init__(self, inner: Chunks, answer: RecordedAnswer) -> None:
        self.usage = inner.usage
        self._inner = inner
        self._answer = answer

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Implement ``Chunks``."""
        events = self._inner.of(frame)
        self._answer.add(frame)
        self._answer.add_events(events)
        return events
