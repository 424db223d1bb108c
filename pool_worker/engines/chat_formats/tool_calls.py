"""Reads tool calls from the deltas of servers that imitate OpenAI's. Never merges two calls or splits one.

In OpenAI's format, a delta carries its call's ``index``, the first delta of a call its ``id`` and name, and calls come
one after another. Other servers omit the index or give every call the same one, repeat ids and names in each delta, mix
several calls in one delta or interleave them, and send arguments as an object or not at all.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from pool_worker.engines.framing import MalformedEvent
from protocol.job import Part
from protocol.wire import UNDECODABLE

MAX_CALLS: Final = 128  # per answer


class FunctionDelta(msgspec.Struct):
    """The function part of a delta."""

    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class CallDelta(msgspec.Struct):
    """A delta of one call."""

    index: int | None = None
    id: str | None = None
    function: FunctionDelta | None = None


class _Call:
    def __init__(self, index: int | None, call_id: str, name: str) -> None:
        self.index = index
        self.id = call_id
        self.name = name
        self.arguments = ""
        self.sent_chars = 0  # of the arguments
        self.is_sent = False

    @property
    def is_whole(self) -> bool:
        """True if the arguments are a JSON object, so that nothing can follow."""
        if not self.arguments.rstrip().endswith("}"):
            return False
        try:
            msgspec.json.decode(self.arguments, type=dict[str, msgspec.Raw])
        except UNDECODABLE:
            return False
        return True

    def unsent_parts(self) -> list[Part]:
        """Return the parts that have not been sent yet."""
        parts = []
        if not self.is_sent:
            parts.append(Part("call", self.name, self.id))
            self.is_sent = True
        if len(self.arguments) > self.sent_chars:
            parts.append(Part("arguments", self.arguments[self.sent_chars :]))
            self.sent_chars = len(self.arguments)
        return parts


class CallReader:
    """Reads the deltas of one choice's calls, and returns the calls one after another.

    The open call is returned as it arrives. Later calls wait until the open one is complete or the answer ends.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []  # in order of their first deltas
        self._open = 0  # index of the call being sent; earlier ones are complete
        self._latest: _Call | None = None  # the call of the last delta

    def read(self, deltas: Sequence[CallDelta]) -> list[Part]:
        """Return the parts to send after one event's deltas. Raises MalformedEvent."""
        for delta in deltas:
            function = delta.function or FunctionDelta()
            call = self._latest = self._call_of(delta, function)
            raw = function.arguments
            text = raw if isinstance(raw, str) else "" if raw is None else msgspec.json.encode(raw).decode()
            if text.strip() and self._calls.index(call) < self._open:
                raise MalformedEvent("arguments of a call that has ended")
            call.arguments += text
        parts = []
        while self._open < len(self._calls):
            call = self._calls[self._open]
            if call.name:
                parts += call.unsent_parts()
            if self._open + 1 == len(self._calls) or not (call.name and call.is_whole):
                break
            self._open += 1
        return parts

    def end(self) -> list[Part]:
        """Return what was held back, at the end of the answer. Raises MalformedEvent for a call without a name."""
        parts = []
        for call in self._calls[self._open :]:
            if not call.name:
                raise MalformedEvent("a call without a name")
            if not call.arguments.strip():
                call.arguments += "{}"
            parts += call.unsent_parts()
        self._open = len(self._calls)
        return parts

    def _call_of(self, delta: CallDelta, function: FunctionDelta) -> _Call:
        """Return the delta's call, which may be new."""
        known = self._known(delta)
        if known is not None and not self._begins(known, delta, function):
            known.name = known.name or function.name or ""
            known.id = known.id or delta.id or ""
            return known
        if not (function.name or delta.id):
            raise MalformedEvent("arguments of a call that has not begun")
        if len(self._calls) == MAX_CALLS:
            raise MalformedEvent(f"more than {MAX_CALLS} calls")
        is_double = any(call.id == delta.id for call in self._calls)  # the gateway assigns another id
        call = _Call(delta.index, "" if is_double else delta.id or "", function.name or "")
        self._calls.append(call)
        return call

    def _known(self, delta: CallDelta) -> _Call | None:
        if delta.index is not None:
            return next((call for call in reversed(self._calls) if call.index == delta.index), None)
        if delta.id:
            return next((call for call in reversed(self._calls) if call.id == delta.id), None)
        return self._latest

    @staticmethod
    def _begins(known: _Call, delta: CallDelta, function: FunctionDelta) -> bool:
        """Return whether a delta begins a new call although its index, or none, matches ``known``."""
        if not function.name or not known.name:
            return False
        if delta.id and known.id:
            return delta.id != known.id
        return function.name != known.name or known.is_whole
