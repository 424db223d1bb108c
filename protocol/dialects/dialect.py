"""One model's formats of reasoning and calls: parsing its answers and, if requested, constraining them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from protocol.dialects.base import MAX_FORCED_CALLS, Tool, ToolFormat
from protocol.dialects.lark import LarkGrammar
from protocol.dialects.marked import new_call_id
from protocol.dialects.registry import (
    GENERIC,
    HARMONY,
    NONE,
    REASONING_FORMATS,
    TOOL_FORMATS,
    reasoning_parser_of,
    tool_parser_of,
)
from protocol.dialects.source import Kind, Piece, Reading, Source
from protocol.dialects.thinking import Thinking
from protocol.generation import Grammar
from protocol.job import Markup

FIELD: Final = "tools"  # the request's field to name when the grammar of its calls is refused
ANY_OBJECT: Final = {"type": "object"}
SLICE_CHARS: Final = 4096  # of a text, passed to its reader at a time


@dataclass(frozen=True)
class Dialect:
    """The formats of one model's reasoning and calls."""

    format: ToolFormat | None
    thinking: Thinking | None
    takes_tools: bool
    token_ids: Mapping[str, int]  # of marks that are single tokens
    has_special_marks: bool  # whether some are special tokens, omitted from text by default
    tool_parser: str = NONE
    reasoning_parser: str = NONE

    @classmethod
    def named(cls, tool_parser: str, reasoning_parser: str) -> "Dialect":
        """Return the dialect of these parsers, to read with; there may be nothing to parse."""
        if HARMONY in {tool_parser, reasoning_parser}:  # one format for both
            tool_format = TOOL_FORMATS[HARMONY] if reasoning_parser == HARMONY else None
            tool_parser = tool_parser if tool_format else NONE
        else:
            tool_format = TOOL_FORMATS.get(tool_parser)
        return cls(
            tool_format,
            REASONING_FORMATS.get(reasoning_parser),
            takes_tools=tool_parser != NONE,
            token_ids={},
            has_special_marks=False,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
        )

    @classmethod
    def of(
        cls,
        template: str,
        added_tokens: Mapping[str, tuple[int, bool]],
        *,
        knows_tools: bool = True,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> "Dialect | None":
        """Return the dialect of a chat template, unless parsers are named; None if there is nothing to parse.

        ``added_tokens``: the vocabulary's added tokens by text: id, and whether special. ``knows_tools``: whether the
        template tells the model of tools.
        """
        reasoning_parser = reasoning_parser or reasoning_parser_of(template)
        if tool_parser is None:
            detected = tool_parser_of(template) if knows_tools else NONE
            is_generic = bool(template) and detected == NONE and reasoning_parser != HARMONY
            tool_parser = GENERIC if is_generic else detected
        found = cls.named(tool_parser, reasoning_parser)
        tool_format, thinking = found.format, found.thinking
        if tool_format is None and thinking is None:
            return None
        marks = (*(tool_format.marks if tool_format else ()), *((thinking.open, thinking.close) if thinking else ()))
        known = {mark: added_tokens[mark] for mark in marks if mark in added_tokens}
        return replace(
            found,
            token_ids={mark: token_id for mark, (token_id, _) in known.items()},
            has_special_marks=any(is_special for _, is_special in known.values()),
        )

    @property
    def is_generic(self) -> bool:
        """True if the prompt describes tools, as the template does not: ``protocol.dialects.generic``."""
        return self.tool_parser == GENERIC

    @property
    def has_reasoning(self) -> bool:
        """True if every answer must be parsed, even without tools."""
        return self.thinking is not None or (self.format is not None and self.format.reads_reasoning)


PLAIN: Final = Dialect(None, None, takes_tools=False, token_ids={}, has_special_marks=False)  # text only


@dataclass(frozen=True)
class AnswerForm:
    """The permitted form of the answers to one request."""

    dialect: Dialect
    tools: tuple[Tool, ...]  # that answers may call
    is_single_call: bool = False  # further calls are neither forced nor emitted
    begins_in_reasoning: bool = False  # the prompt opens the reasoning
    is_legacy: bool = False  # its one call is returned as ``function_call``

    @classmethod
    def of_markup(cls, markup: Markup) -> "AnswerForm":
        """Return the form described by ``markup``, whose tools have no schemas."""
        tools = tuple(Tool(name, {}, is_strict=False) for name in markup.tools)
        dialect = Dialect.named(markup.tool_parser, markup.reasoning_parser)
        return cls(dialect, tools, begins_in_reasoning=markup.begins_in_reasoning)

    @property
    def markup(self) -> Markup:
        """The data that others need to separate content from reasoning and calls."""
        names, dialect = tuple(tool.name for tool in self.tools), self.dialect
        return Markup(dialect.tool_parser, dialect.reasoning_parser, names, self.begins_in_reasoning)

    def parser(self) -> "AnswerParser":
        """Return a parser for one choice."""
        return AnswerParser(self)

    def read(self, source: Source) -> Reading[None]:
        """Read one choice's reasoning, content and calls."""
        dialect = self.dialect
        if dialect.thinking is not None:
            yield from dialect.thinking.read(source, is_open=self.begins_in_reasoning)
        if dialect.format is not None and (self.tools or dialect.format.reads_reasoning):
            yield from dialect.format.read(source, {tool.name: tool.schema for tool in self.tools})
        else:
            yield from source.pass_until((), Kind.CONTENT)

    def new_call_id(self) -> str:
        """Return an id for a call in the form that this model's template expects."""
        return self.dialect.format.call_id() if self.dialect.format is not None else new_call_id()

    def grammar(self, *, must_call: bool, content: Grammar | None) -> Grammar | None:
        """Return the grammar of the answers; None if they are unconstrained.

        Calls are constrained if one is required or a tool is strict; other tools then accept any object as arguments.
        If the model was not trained for the format, calls are always constrained, but by an optional grammar.
        ``content``: the grammar of all text outside calls. Raises ValueError if it cannot be distinguished from a call.
        """
        dialect, is_optional = self.dialect, False
        lark = LarkGrammar(dialect.token_ids)
        tool_format = dialect.format
        if must_call and tool_format is not None:
            body = tool_format.forced(lark, self.tools, most=self._max_calls)
        elif content is not None:
            body = self._answer(lark, content)
        elif tool_format is not None and self.tools and (dialect.is_generic or self._has_strict):
            body = tool_format.free(lark, self._loosened(), most=self._max_calls)
            is_optional = not self._has_strict
        else:
            return None
        before = ""
        if dialect.thinking is not None:
            before = dialect.thinking.before(lark, is_open=self.begins_in_reasoning)
        field = content.field if content is not None and not self.tools else FIELD
        return Grammar("lark", lark.source(f"{before} ({body})"), field, is_optional=is_optional)

    @property
    def _has_strict(self) -> bool:
        return any(tool.is_strict for tool in self.tools)

    @property
    def _max_calls(self) -> int:
        return 1 if self.is_single_call else MAX_FORCED_CALLS

    def _answer(self, lark: LarkGrammar, content: Grammar) -> str:
        rule = _rule_of(lark, content)
        tool_format = self.dialect.format
        if tool_format is None or not (self.tools or tool_format.reads_reasoning):
            return rule
        answer = tool_format.answer(lark, rule)
        if answer is None:
            raise ValueError("this model writes its calls as JSON, so they cannot be distinguished from the answer")
        if not self.tools:
            return answer
        return f"{answer} | {tool_format.forced(lark, self._loosened(), most=self._max_calls)}"

    def _loosened(self) -> list[Tool]:
        return [tool if tool.is_strict else Tool(tool.name, ANY_OBJECT, is_strict=False) for tool in self.tools]


class AnswerParser:
    """An incremental parser of one choice's text into pieces."""

    def __init__(self, form: AnswerForm) -> None:
        self.form = form
        self._source = Source()
        self._reading = form.read(self._source)
        self._is_single_call = form.is_single_call
        self._calls = 0

    @property
    def reasoning(self) -> Sequence[tuple[int, int]]:
        """Begin and end of each emitted stretch of reasoning, in the complete text."""
        return self._source.reasoning

    def push(self, text: str, *, is_last: bool) -> list[Piece]:
        """Add text; return the pieces that are certain so far, and all of them after the last text."""
        # Held text is copied repeatedly, which is slow for a complete answer at once.
        for start in range(0, len(text) or 1, SLICE_CHARS):
            self._source.feed(text[start : start + SLICE_CHARS])
            self._source.has_ended = is_last and start + SLICE_CHARS >= len(text)
            next(self._reading, None)
        pieces = self._source.take_pieces()
        return [piece for piece in pieces if self._is_emitted(piece)] if self._is_single_call else pieces

    def _is_emitted(self, piece: Piece) -> bool:
        self._calls += piece.kind is Kind.CALL
        return self._calls <= 1 or piece.kind not in {Kind.CALL, Kind.ARGUMENTS}


class ContentFinder:
    """Finds the content in one choice's text: an ``engine.text.stop_strings.ContentFinder``."""

    def __init__(self, form: AnswerForm) -> None:
        self._source = Source()
        self._reading = form.read(self._source)

    @property
    def read_chars(self) -> int:
        """Number of characters of the text that are known to be content, or not."""
        return self._source.read_chars

    def push(self, text: str, *, is_last: bool) -> list[tuple[int, int]]:
        """Add text; return begin and end, in the complete text, of each new stretch of content."""
        self._source.feed(text)
        self._source.has_ended = is_last
        next(self._reading, None)
        self._source.take_pieces()
        return self._source.take_content()


def _rule_of(lark: LarkGrammar, grammar: Grammar) -> str:
    """Return a rule for the client's grammar of the content. Raises ValueError for a schema that is not an object."""
    if grammar.kind == "regex":
        return lark.rule("/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", grammar.source).replace("\n", r"\n") + "/")
    if grammar.kind == "lark":
        return lark.rule(f"%lark {{\n{grammar.source}\n}}")
    schema = ANY_OBJECT if grammar.kind == "json_object" else json.loads(grammar.source)
    if not isinstance(schema, Mapping):
        raise ValueError("the schema must be a JSON object")  # noqa: TRY004  # the client's value is invalid
    return lark.json(schema)
