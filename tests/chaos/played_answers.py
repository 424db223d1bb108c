"""Answers to ``plays``: put together from their events, whose order and completeness are checked on the way.

All of a choice becomes one text: its reasoning, its text, and each call's name and argument bytes, in their order. So
what a rescue loses, repeats or changes of any of them is counted by the word. Ids, times and what was cached are left
out: they differ by nature.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.http_client import Exchange
from tests.chaos.background import events_of
from tests.chaos.mix import CHAT, MESSAGES, RESPONSES, Question
from tests.chaos.oracle import Answer, BadAnswer, Choice

Event = dict[str, Any]
Place = tuple[int, str, int]  # of a delta: its choice; "reasoning", "text" or "call"; the number of its call or block
DONE = "[DONE]"


def read_played(question: Question, reply: Exchange) -> Answer:
    """Take a reply apart. Raises BadAnswer if it is an error, incomplete, or its events are not well-formed."""
    if reply.status != 200:
        raise BadAnswer(f"HTTP {reply.status}: {reply.body[:300].decode(errors='replace')}")
    try:
        if question.streams:
            return _read_stream(question, reply)
        return _BODIES[question.path](question, json.loads(reply.body))
    except (LookupError, TypeError, ValueError) as error:
        raise BadAnswer(f"something is missing or of another type: {error!r}") from error


def _read_stream(question: Question, reply: Exchange) -> Answer:
    timed = timed_events(reply)
    answer = _STREAMS[question.path](question, [event for _, event in timed])
    answer.arrivals_s = [arrived_s for arrived_s, event in timed if places(event)]
    return answer


def timed_events(reply: Exchange) -> list[tuple[float, Event]]:
    """Return the events of a stream, so far, with their times of arrival. Raises BadAnswer."""
    return [(arrived_s, _event(raw)) for arrived_s, raw in events_of(reply)]


def _event(raw: bytes) -> Event:
    lines = raw.decode().rstrip("\n").split("\n")
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    _check(len(data) == 1 and len(names) + len(data) == len(lines), "this is no event", raw)
    event: Event = {"type": DONE} if data[0] == DONE else json.loads(data[0])
    _check("error" not in event or event["error"] is None, "the stream ended in an error", event)
    _check(not names or names == [event["type"]], "an event has two names", raw)
    return event


def places(event: Event) -> list[Place]:
    """Return what an event brings more of; nothing if it has no content."""
    if "choices" in event:
        return [place for part in event["choices"] for place in _chat_places(part)]
    if event["type"] == "content_block_delta":
        kind, index = _DELTAS.get(event["delta"]["type"]), event["index"]
    else:
        kind, index = _DELTAS.get(event["type"]), event.get("output_index", 0)
    return [] if kind is None else [(0, kind, index)]


_DELTAS = {
    "response.reasoning_text.delta": "reasoning",
    "response.output_text.delta": "text",
    "response.function_call_arguments.delta": "call",
    "thinking_delta": "reasoning",
    "text_delta": "text",
    "input_json_delta": "call",
}


def _chat_places(part: dict[str, Any]) -> list[Place]:
    delta, choice = part["delta"], part["index"]
    found = [(choice, kind, 0) for kind, name in _CHAT_TEXTS.items() if delta.get(name)]
    calls = [call for call in delta.get("tool_calls") or () if call["function"].get("arguments")]
    return found + [(choice, "call", call["index"]) for call in calls]


def _check(holds: bool, what: str, shown: object) -> None:
    if not holds:
        raise BadAnswer(f"{what}: {shown!r}"[:1000])


@dataclass(slots=True)
class _Parts:
    """The parts of a choice, in their order."""

    told: list[list[str]] = field(default_factory=list)  # kind, or "call" and the name; text

    def add(self, kind: str, text: str) -> None:
        """Add to the last part, or begin another one."""
        if not self.told or self.told[-1][0] != kind:
            self.told.append([kind, ""])
        self.told[-1][1] += text

    def call(self, name: str, arguments: str = "") -> None:
        """Begin a call."""
        self.told.append([f"call {name}", arguments])

    def choice(self, question: Question, finish_reason: str, *, cut: bool) -> Choice:
        """Return the choice, if all that should be JSON is. ``cut``: it was not to be longer."""
        told = list(self.told)
        for kind, text in told[:-1] if cut else told:
            if kind.startswith("call") or (kind == "text" and "json" in question.kind):
                _check(_is_json(text), f"{kind} is no JSON", text)
        return Choice("".join(f"<{kind}>\n{text}\n" for kind, text in told), finish_reason)


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _usage(prompt: int, completion: int, total: int, reasoning: int = 0) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": total,
        "reasoning_tokens": reasoning,
    }


# --- chats ------------------------------------------------------------------------------------------------------------

_CHAT_TEXTS = {"reasoning": "reasoning_content", "text": "content"}


@dataclass(slots=True)
class _ChatChoice:
    parts: _Parts = field(default_factory=_Parts)
    calls: int = 0
    has_begun: bool = False
    finish_reason: str | None = None

    def add(self, part: dict[str, Any]) -> None:
        _check(self.finish_reason is None, "a choice goes on after its end", part)
        delta = part["delta"]
        self.finish_reason = part["finish_reason"]
        if self.finish_reason is None:
            _check(("role" in delta) is not self.has_begun, "the role is not told once, and first", part)
            self.has_begun = True
        _check(delta.get("reasoning") == delta.get("reasoning_content"), "reasoning differs by its name", part)
        for kind, name in _CHAT_TEXTS.items():
            if delta.get(name):
                self.parts.add(kind, delta[name])
        for call in delta.get("tool_calls") or ():
            self._add_call(call)

    def _add_call(self, call: dict[str, Any]) -> None:
        function = call["function"]
        if call.keys() & {"id", "type"} or "name" in function:
            _check(call["index"] == self.calls, "a call has another's index", call)
            _check(bool(call["id"]) and call["type"] == "function" and function["name"], "a call lacks its head", call)
            self.calls += 1
            self.parts.call(function["name"], function["arguments"])
        else:
            _check(call["index"] == self.calls - 1, "these are not the last call's arguments", call)
            _check(self.parts.told[-1][0].startswith("call"), "arguments come after something else", call)
            self.parts.told[-1][1] += function["arguments"]


def _chat_stream(question: Question, events: Sequence[Event]) -> Answer:
    _check(bool(events) and events[-1] == {"type": DONE}, "the stream ended without [DONE]", events[-1:])
    choices = [_ChatChoice() for _ in range(question.choices)]
    wants_usage = "stream_options" in question.body
    usage = None
    head = {name: events[0].get(name) for name in ("id", "object", "created", "model")}
    for event in events[:-1]:
        _check(head.items() <= event.items(), "a chunk is another answer's", event)
        _check(usage is None, "something follows the usage", event)
        _check(wants_usage or not event.get("usage"), "nobody wanted to know the usage", event)
        usage = event.get("usage")
        _check((usage is None) is bool(event["choices"]), "usage stands beside choices, or nothing does", event)
        for part in event["choices"]:
            choices[part["index"]].add(part)
    _check((usage is not None) is wants_usage, "the usage is missing", events[-2])
    told = [_chat_choice(question, choice.parts, choice.finish_reason) for choice in choices]
    return Answer(told, None if usage is None else _chat_usage(usage))


def _chat_body(question: Question, body: dict[str, Any]) -> Answer:
    _check([row["index"] for row in body["choices"]] == list(range(question.choices)), "choices are missing", body)
    told = []
    for row in body["choices"]:
        parts, message = _Parts(), row["message"]
        for kind, name in _CHAT_TEXTS.items():
            if message.get(name):
                parts.add(kind, message[name])
        for call in message.get("tool_calls") or ():
            parts.call(call["function"]["name"], call["function"]["arguments"])
        told.append(_chat_choice(question, parts, row["finish_reason"]))
    return Answer(told, _chat_usage(body["usage"]))


def _chat_choice(question: Question, parts: _Parts, finish_reason: str | None) -> Choice:
    if finish_reason is None:
        raise BadAnswer(f"a choice has no finish reason: {parts}")
    return parts.choice(question, finish_reason, cut=finish_reason == "length")


def _chat_usage(usage: dict[str, Any]) -> dict[str, int]:
    details = usage.get("completion_tokens_details") or {}
    counts = usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]
    return _usage(*counts, details.get("reasoning_tokens", 0))


# --- Messages ---------------------------------------------------------------------------------------------------------

# Of each type of delta: the type of the block that it belongs to, its field, and the block's.
_BLOCK_DELTAS = {
    "thinking_delta": ("thinking", "thinking", "thinking"),
    "signature_delta": ("thinking", "signature", "signature"),
    "text_delta": ("text", "text", "text"),
    "input_json_delta": ("tool_use", "partial_json", "input"),
}
_EMPTY: dict[str, dict[str, Any]] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}


def _message_stream(question: Question, events: Sequence[Event]) -> Answer:
    kinds = [event["type"] for event in events]
    _check(kinds[:1] == ["message_start"] and kinds.count("message_start") == 1, "it does not start", kinds[:3])
    _check(kinds[-2:] == ["message_delta", "message_stop"], "it does not stop", kinds[-3:])
    message = events[0]["message"]
    _check(message["content"] == [] and message["stop_reason"] is None, "it does not start empty", message)
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events[1:-2]:
        is_open = _read_block_event(event, blocks, is_open=is_open)
    _check(not is_open, "a block is still open", blocks[-1:])
    return _message(question, {**message, **events[-2]["delta"], "usage": events[-2]["usage"], "content": blocks})


def _read_block_event(event: Event, blocks: list[dict[str, Any]], *, is_open: bool) -> bool:
    """Add an event to the blocks; returns whether the last of them is open."""
    if event["type"] == "content_block_start":
        block = event["content_block"]
        _check(not is_open and event["index"] == len(blocks), "a block starts inside another", event)
        _check(_EMPTY[block["type"]].items() <= block.items(), "a block does not start empty", event)
        blocks.append({**block, **({"input": ""} if block["type"] == "tool_use" else {})})
        return True
    _check(is_open and event["index"] == len(blocks) - 1, "it belongs to no open block", event)
    if event["type"] == "content_block_stop":
        _check(blocks[-1].get("signature") != "", "thinking ends without its signature", blocks[-1])
        return False
    _check(event["type"] == "content_block_delta", "this is no event of a block", event)
    delta = event["delta"]
    kind, name, into = _BLOCK_DELTAS[delta["type"]]
    _check(kind == blocks[-1]["type"], "a delta is of another block's type", event)
    _check(not blocks[-1].get("signature"), "thinking goes on after its signature", event)
    blocks[-1][into] += delta[name]
    return True


def _message(question: Question, body: dict[str, Any]) -> Answer:
    parts = _Parts()
    for block in body["content"]:
        if block["type"] == "tool_use":
            _check(bool(block["id"]), "a call has no id", block)
            given = block["input"]  # an object, unless its bytes were streamed
            parts.call(block["name"], given if isinstance(given, str) else json.dumps(given))
        else:
            text = block["thinking" if block["type"] == "thinking" else "text"]
            parts.add("reasoning" if block["type"] == "thinking" else "text", text)
    reason, usage = body["stop_reason"], body["usage"]
    choice = parts.choice(question, f"{reason} {body['stop_sequence']}", cut=reason == "max_tokens")
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    return Answer([choice], _usage(prompt, usage["output_tokens"], prompt + usage["output_tokens"]))


# --- Responses --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Items:
    """The items of a response, built from its events."""

    done: list[dict[str, Any]] = field(default_factory=list)
    _item: dict[str, Any] | None = None  # that is open
    _part: dict[str, Any] | None = None  # likewise, inside it
    _is_told: bool = False  # whether the part, or the arguments, has been told whole

    @property
    def are_closed(self) -> bool:
        return self._item is None

    def add(self, event: Event) -> None:
        kind = event["type"]
        _check(event["output_index"] == len(self.done), "it is of another item", event)
        if kind == "response.output_item.added":
            _check(self._item is None and event["item"]["status"] == "in_progress", "an item opens in another", event)
            self._item, self._is_told = dict(event["item"]), False
            return
        item = self._item
        if item is None:
            raise BadAnswer(f"no item is open: {event}")
        _check(event.get("item_id", item["id"]) == item["id"], "it has another item's id", event)
        if kind == "response.output_item.done":
            self._close(item, event)
        elif kind.startswith("response.function_call_arguments."):
            self._add_arguments(item, event)
        elif kind.startswith("response.content_part."):
            self._add_part(item, event)
        else:
            self._add_text(item, event)

    def _close(self, item: dict[str, Any], event: Event) -> None:
        _check(self._part is None and self._is_told, "an item ends before its parts", event)
        _check(event["item"] == {**item, "status": event["item"]["status"]}, "an item is not its parts", [item, event])
        _check(event["item"]["status"] in {"completed", "incomplete"}, "an item has no end", event)
        self.done.append(event["item"])
        self._item = None

    def _add_arguments(self, item: dict[str, Any], event: Event) -> None:
        _check(item["type"] == "function_call" and not self._is_told, "an item takes no arguments now", event)
        if event["type"].endswith(".delta"):
            item["arguments"] += event["delta"]
        else:
            _check(event["arguments"] == item["arguments"], "the arguments are not their deltas", [item, event])
            _check(event["name"] == item["name"], "a call's name changes", event)
            self._is_told = True

    def _add_part(self, item: dict[str, Any], event: Event) -> None:
        _check(event["content_index"] == len(item["content"]), "it is another part's", event)
        if event["type"].endswith(".added"):
            _check(self._part is None and event["part"]["text"] == "", "a part opens in another, or full", event)
            self._part, self._is_told = dict(event["part"]), False
        else:
            _check(self._is_told and event["part"] == self._part, "a part is not its deltas", [self._part, event])
            item["content"] = [*item["content"], self._part]
            self._part = None

    def _add_text(self, item: dict[str, Any], event: Event) -> None:
        part, kind = self._part, event["type"]
        if part is None:
            raise BadAnswer(f"no part is open: {event}")
        _check(event["content_index"] == len(item["content"]), "it is another part's", event)
        if kind == f"response.{part['type']}.delta":
            _check(not self._is_told, "a part goes on after its end", event)
            part["text"] += event["delta"]
        else:
            _check(kind == f"response.{part['type']}.done" and not self._is_told, "this belongs to no part", event)
            _check(event["text"] == part["text"], "the text is not its deltas", [part, event])
            self._is_told = True


def _response_stream(question: Question, events: Sequence[Event]) -> Answer:
    numbers = [event["sequence_number"] for event in events]
    _check(numbers == list(range(len(events))), "sequence numbers have gaps", numbers)
    kinds = [event["type"] for event in events]
    _check(kinds[:2] == ["response.created", "response.in_progress"], "it does not start", kinds[:3])
    _check(kinds[-1] in {"response.completed", "response.incomplete"}, "it does not end", kinds[-1])
    told = [events[0]["response"], events[1]["response"], events[-1]["response"]]
    _check(told[0]["output"] == told[1]["output"] == [], "it does not start empty", told[0])
    _check(len({response["id"] for response in told}) == 1, "the id changes", told)
    _check(f"response.{told[-1]['status']}" == kinds[-1], "its end has two names", told[-1])
    items = _Items()
    for event in events[2:-1]:
        items.add(event)
    _check(items.are_closed and items.done == told[-1]["output"], "it is not its items", [items, told[-1]])
    return _response(question, told[-1])


def _response(question: Question, body: dict[str, Any]) -> Answer:
    parts = _Parts()
    for item in body["output"]:
        if item["type"] == "function_call":
            _check(bool(item["call_id"]), "a call has no id", item)
            parts.call(item["name"], item["arguments"])
        else:
            kind = "reasoning" if item["type"] == "reasoning" else "text"
            parts.add(kind, "".join(part["text"] for part in item["content"]))
    status, usage = body["status"], body["usage"]
    choice = parts.choice(question, f"{status} {body['incomplete_details']}", cut=status == "incomplete")
    counts = usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]
    return Answer([choice], _usage(*counts, usage["output_tokens_details"]["reasoning_tokens"]))


_STREAMS: dict[str, Callable[[Question, Sequence[Event]], Answer]] = {
    CHAT: _chat_stream,
    MESSAGES: _message_stream,
    RESPONSES: _response_stream,
}
_BODIES: dict[str, Callable[[Question, dict[str, Any]], Answer]] = {
    CHAT: _chat_body,
    MESSAGES: _message,
    RESPONSES: _response,
}
