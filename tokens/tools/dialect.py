"""How one model writes reasoning and calls; how one answer of it is read and, where that is asked for, forced."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from protocol.grammar import Grammar
from tokens.tools.base import MAX_FORCED_CALLS, Tool, ToolFormat
from tokens.tools.lark import LarkGrammar
from tokens.tools.marked import new_call_id
from tokens.tools.registry import (
    HARMONY,
    NONE,
    REASONING_FORMATS,
    TOOL_FORMATS,
    reasoning_parser_of,
    tool_parser_of,
)
from tokens.tools.source import Kind, Piece, Reading, Source
from tokens.tools.thinking import Thinking

FIELD: Final = "tools"  # of a request: at fault where the grammar of its calls is refused
ANY_OBJECT: Final = {"type": "object"}
SLICE_CHARS: Final = 4096  # of a text that its reader gets at once


@dataclass(frozen=True)
class Dialect:
    """How one model writes."""

    format: ToolFormat | None
    thinking: Thinking | None
    takes_tools: bool
    token_ids: Mapping[str, int]  # of marks that are single tokens
    has_special_marks: bool  # whether some of them are left out of a text unless asked for

    @classmethod
    def of(
        cls,
        template: str,
        added_tokens: Mapping[str, tuple[int, bool]],
        *,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> "Dialect | None":
        """The dialect of a chat template, as far as no other is named; None where there is nothing to be read.

        ``added_tokens``: those of the vocabulary by their text: id, and whether it is special.
        """
        tool_parser = tool_parser or tool_parser_of(template)
        reasoning_parser = reasoning_parser or reasoning_parser_of(template)
        if HARMONY in {tool_parser, reasoning_parser}:  # it has both in one, or neither
            tool_format = TOOL_FORMATS[HARMONY] if reasoning_parser == HARMONY else None
            tool_parser = tool_parser if tool_format else NONE
        else:
            tool_format = TOOL_FORMATS.get(tool_parser)
        thinking = REASONING_FORMATS.get(reasoning_parser)
        if tool_format is None and thinking is None:
            return None
        marks = (*(tool_format.marks if tool_format else ()), *((thinking.open, thinking.close) if thinking else ()))
        known = {mark: added_tokens[mark] for mark in marks if mark in added_tokens}
        return cls(
            tool_format,
            thinking,
            takes_tools=tool_parser != NONE,
            token_ids={mark: token_id for mark, (token_id, _) in known.items()},
            has_special_marks=any(is_special for _, is_special in known.values()),
        )

    @property
    def has_reasoning(self) -> bool:
        """Whether every answer must be read, also where no tools are given."""
        return self.thinking is not None or (self.format is not None and self.format.reads_reasoning)


PLAIN: Final = Dialect(None, None, takes_tools=False, token_ids={}, has_special_marks=False)  # mere text


@dataclass(frozen=True)
class AnswerForm:
    """What the answers to one request may hold."""

    dialect: Dialect
    tools: tuple[Tool, ...]  # that may be called
    is_single_call: bool = False  # further ones are neither forced nor told
    begins_in_reasoning: bool = False  # the prompt has begun it
    is_legacy: bool = False  # its one call is told as ``function_call``

    def parser(self) -> "AnswerParser":
        """What reads one choice."""
        return AnswerParser(self)

    def read(self, source: Source) -> Reading[None]:
        """Read one choice."""
        dialect = self.dialect
        if dialect.thinking is not None:
            yield from dialect.thinking.read(source, is_open=self.begins_in_reasoning)
        if dialect.format is not None and (self.tools or dialect.format.reads_reasoning):
            yield from dialect.format.read(source, {tool.name: tool.schema for tool in self.tools})
        else:
            yield from source.pass_until((), Kind.CONTENT)

    def new_call_id(self) -> str:
        """An id for a call, as this model's template wants it to be."""
        return self.dialect.format.call_id() if self.dialect.format is not None else new_call_id()

    def grammar(self, *, must_call: bool, content: Grammar | None) -> Grammar | None:
        """What forces the answers; None where nothing is to be forced.

        Calls are forced where there must be one, or where a tool is strict; then those of others are any object.
        ``content``: what all must look like that is no call. Raises ValueError where that may not be told from a call.
        """
        dialect = self.dialect
        lark = LarkGrammar(dialect.token_ids)
        tool_format = dialect.format
        if must_call and tool_format is not None:
            body = tool_format.forced(lark, self.tools, most=self._most_calls)
        elif content is not None:
            body = self._answer(lark, content)
        elif tool_format is not None and any(tool.is_strict for tool in self.tools):
            body = tool_format.free(lark, self._loosened(), most=self._most_calls)
        else:
            return None
        before = ""
        if dialect.thinking is not None:
            before = dialect.thinking.before(lark, is_open=self.begins_in_reasoning)
        field = content.field if content is not None and not self.tools else FIELD
        return Grammar("lark", lark.source(f"{before} ({body})"), field)

    @property
    def _most_calls(self) -> int:
        return 1 if self.is_single_call else MAX_FORCED_CALLS

    def _answer(self, lark: LarkGrammar, content: Grammar) -> str:
        rule = _rule_of(lark, content)
        tool_format = self.dialect.format
        if tool_format is None or not (self.tools or tool_format.reads_reasoning):
            return rule
        answer = tool_format.answer(lark, rule)
        if answer is None:
            raise ValueError("this model's calls look like JSON themselves")
        if not self.tools:
            return answer
        return f"{answer} | {tool_format.forced(lark, self._loosened(), most=self._most_calls)}"

    def _loosened(self) -> list[Tool]:
        return [tool if tool.is_strict else Tool(tool.name, ANY_OBJECT, is_strict=False) for tool in self.tools]


class AnswerParser:
    """Takes the text of one choice as it comes, and tells what it is."""

    def __init__(self, form: AnswerForm) -> None:
        self.form = form
        self._source = Source()
        self._reading = form.read(self._source)
        self._is_single_call = form.is_single_call
        self._calls = 0

    @property
    def reasoning(self) -> Sequence[tuple[int, int]]:
        """Where in the whole text reasoning was, as far as it is told: begin and end of each stretch."""
        return self._source.reasoning

    def push(self, text: str, *, is_last: bool) -> list[Piece]:
        """Take more text; return what can be told by now, and after the last text everything."""
        # What is not told yet is copied again and again: a whole answer at once would make that long.
        for start in range(0, len(text) or 1, SLICE_CHARS):
            self._source.feed(text[start : start + SLICE_CHARS])
            self._source.has_ended = is_last and start + SLICE_CHARS >= len(text)
            next(self._reading, None)
        pieces = self._source.take_pieces()
        return [piece for piece in pieces if self._is_wanted(piece)] if self._is_single_call else pieces

    def _is_wanted(self, piece: Piece) -> bool:
        self._calls += piece.kind is Kind.CALL
        return self._calls <= 1 or piece.kind not in {Kind.CALL, Kind.ARGUMENTS}


def _rule_of(lark: LarkGrammar, grammar: Grammar) -> str:
    """A rule of what the caller wants all content to look like. Raises ValueError for a schema that is no object."""
    if grammar.kind == "regex":
        return lark.rule("/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", grammar.source).replace("\n", r"\n") + "/")
    if grammar.kind == "lark":
        return lark.rule(f"%lark {{\n{grammar.source}\n}}")
    schema = ANY_OBJECT if grammar.kind == "json_object" else json.loads(grammar.source)
    if not isinstance(schema, Mapping):
        raise ValueError("the schema must be a JSON object")  # noqa: TRY004  # the caller's value is at fault
    return lark.json(schema)
