"""Checks what has been answered against the schemas that no grammar could enforce whole (``json_schema``).

The answer has been made and paid for, so it is sent whatever comes out; each choice tells it in ``schema_errors``. A
check runs between others' tokens: what it may cost is bounded, and a schema that cannot be bounded is not checked.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

import jsonschema_rs

from gateway.api.sse import decoded, event
from gateway.request.mailbox import Chunks
from protocol.job import Deltas, Tokens

MAX_SCHEMA_CHARS: Final = 16_384  # of patterns alone, it takes some 50 ms to compile
MAX_WORK: Final = 8_000_000  # characters of schema times characters of answer: at most some 35 ms
MAX_ERRORS: Final = 8  # are told of an answer
MAX_ERROR_CHARS: Final = 300
PATTERN_BYTES: Final = 1_048_576  # of a compiled pattern, which takes time in proportion to the text
# With these a small schema can take endless time.
_UNBOUNDED: Final = frozenset({"$ref", "$dynamicRef", "$recursiveRef", "unevaluatedProperties", "unevaluatedItems"})
_COMPLETE: Final = frozenset({"stop", "tool_calls", "function_call"})  # finish reasons of answers that can be judged


class SchemaCheck:
    """The schemas of one request that are left to be checked."""

    def __init__(self) -> None:
        self._content: _Checked | None = None
        self._tools: dict[str, _Checked] = {}  # by name

    def __bool__(self) -> bool:
        """True if there is anything to check."""
        return self._content is not None or bool(self._tools)

    def add(self, schema: Any, tool: str | None) -> None:  # noqa: ANN401  # a schema, as it came
        """Have answers checked against a schema: a tool's arguments, or what is no call."""
        if tool is None:
            self._content = _Checked(schema)
        else:
            self._tools[tool] = _Checked(schema)

    def fields(self, text: str | None, calls: list[dict[str, Any]], finish_reason: str | None) -> dict[str, Any]:
        """``schema_errors`` of a choice: a list, empty where all is well, or None where that could not be checked.

        ``calls``: the ``function`` of each. Nothing is told of an answer that was cut off.
        """
        if finish_reason not in _COMPLETE:
            return {}
        found: list[str] = []
        for checked, value in self._pairs(text, calls):
            errors = checked.errors(value)
            if errors is None:
                return {"schema_errors": None}
            found += errors
        return {"schema_errors": found[:MAX_ERRORS]}

    def _pairs(self, text: str | None, calls: list[dict[str, Any]]) -> "Iterator[tuple[_Checked, str]]":
        for call in calls:
            if (tool := self._tools.get(call["name"])) is not None:
                yield tool, call["arguments"]
        if self._content is not None and not calls:
            yield self._content, text or ""


class _Checked:
    """One schema, compiled when it is first needed."""

    def __init__(self, schema: Any) -> None:  # noqa: ANN401
        self._schema = schema
        self._chars = len(json.dumps(schema))
        self._is_bounded = self._chars <= MAX_SCHEMA_CHARS and not _words(schema) & _UNBOUNDED
        self._validator: Any = None

    def errors(self, text: str) -> list[str] | None:
        """Return what is wrong with a value, for the client to read, or None."""
        if not self._is_bounded or self._chars * len(text) > MAX_WORK:
            return None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return ["$: not JSON"]
        try:
            if self._validator is None:
                patterns = jsonschema_rs.RegexOptions(size_limit=PATTERN_BYTES)
                self._validator = jsonschema_rs.validator_for(self._schema, pattern_options=patterns)
            errors = self._validator.iter_errors(value)
            return [_describe(error) for error, _ in zip(errors, range(MAX_ERRORS), strict=False)]
        except (jsonschema_rs.ValidationError, ValueError):  # an invalid schema, or a pattern that cannot be bounded
            return None


def _describe(error: Any) -> str:  # noqa: ANN401  # jsonschema_rs.ValidationError
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path)
    return f"${path}: {error.message}"[:MAX_ERROR_CHARS]


def _words(schema: Any) -> set[str]:  # noqa: ANN401
    """The names of everything in it, however deep: more than its keywords."""
    found: set[str] = set()
    unread = [schema]
    while unread:
        value = unread.pop()
        if isinstance(value, dict):
            found.update(value)
            unread += value.values()
        elif isinstance(value, list):
            unread += value
    return found


class CheckedChunks:
    """``Chunks`` whose last event of a choice tells ``schema_errors``."""

    def __init__(self, inner: Chunks, check: SchemaCheck, *, choices: int, echo_chars: int = 0) -> None:
        """``echo_chars``: of the prompt, which come before each choice's own."""
        self.usage = inner.usage
        self._inner = inner
        self._check = check
        self._echo_chars = echo_chars
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._calls: list[list[dict[str, Any]]] = [[] for _ in range(choices)]

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Implement ``Chunks``."""
        return b"".join(self._completed(body, frame.index) for body in decoded(self._inner.of(frame)))

    def _completed(self, body: dict[str, Any], choice: int) -> bytes:
        row = body["choices"][0]
        delta: dict[str, Any] = row.get("delta", {})
        self._texts[choice].append(delta.get("content") or row.get("text") or "")
        for call in [*(one["function"] for one in delta.get("tool_calls", ())), delta.get("function_call")]:
            if call is not None:
                self._add(call, self._calls[choice])
        if row["finish_reason"] is not None:
            text = "".join(self._texts[choice])[self._echo_chars :]
            row |= self._check.fields(text, self._calls[choice], row["finish_reason"])
        return event(body)

    @staticmethod
    def _add(function: dict[str, Any], calls: list[dict[str, Any]]) -> None:
        """Take what a delta tells of a call: its name comes first, then its arguments."""
        if "name" in function:
            calls.append({"name": function["name"], "arguments": ""})
        calls[-1]["arguments"] += function.get("arguments", "")


def calls_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The ``function`` of each call in a whole message."""
    legacy = [message["function_call"]] if "function_call" in message else []
    return [call["function"] for call in message.get("tool_calls", ())] + legacy
