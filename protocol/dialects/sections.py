"""Formats with calls in a section, each a head with the name, then its arguments as JSON.

A table of marks describes each family.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from protocol.dialects.base import Schemas, Tool
from protocol.dialects.calls import NO_ARGUMENTS
from protocol.dialects.lark import TEXT, LarkGrammar, literal, one_of
from protocol.dialects.marked import new_call_id, repeated
from protocol.dialects.source import Kind, Reading, Source

MAX_HEAD_CHARS: Final = 256


@dataclass(frozen=True)
class Section:
    """One family's marks."""

    opens: tuple[str, ...]  # any one begins a section; grammars use the first
    close: str
    call: str  # begins a call, also if the model omitted the section's mark
    end_of_call: str
    between: str  # separates calls
    inner_marks: tuple[str, ...]  # of heads
    head: re.Pattern[str]  # between ``call`` and the arguments; groups "name" and optionally "number"
    write_head: Callable[[LarkGrammar, str], str]  # returns an expression for the head of a call
    after_arguments: str = ""  # in grammars
    fence: str = ""  # dropped after the arguments
    own_id: str = ""  # the model's form of call ids, with {name} and {number}


class SectionFormat:
    """Calls in a section, by one family's marks."""

    reads_reasoning = False

    def __init__(self, section: Section) -> None:
        self._section = section
        self._begins = (*section.opens, section.call)
        self.marks: tuple[str, ...] = (*self._begins, section.end_of_call, section.close, *section.inner_marks)

    def read(self, source: Source, tools: Schemas) -> Reading[None]:
        """Read content and calls of ``tools`` to the end of the text."""
        del tools
        section, marks, number = self._section, self._begins, -1
        while mark := (yield from source.pass_until(marks, Kind.CONTENT)):
            if mark not in self._begins:  # only after a call
                yield from source.skip_space()
                marks = self._begins if mark == section.close else marks
                continue
            if mark != section.call and not (yield from source.follows(section.call)):
                source.give_back(Kind.CONTENT)
                continue
            head = yield from self._look_at_head(source)
            if head is None:
                source.give_back(Kind.CONTENT)
                continue
            number = max(number + 1, int(head.groupdict().get("number") or 0))
            source.emit(Kind.CALL, head["name"], section.own_id.format(name=head["name"], number=number))
            yield from self._read_arguments(source)
            marks = (*self._begins, section.end_of_call, section.close)

    def call_id(self) -> str:
        """Return a new id for a call."""
        return new_call_id()

    def forced(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """Return an expression for one to ``most`` calls."""
        section = self._section
        call = lark.rule(f"{lark.mark(section.call)} {self._after_mark(lark, tools)}")
        calls = repeated(call, literal(section.between) if section.between else "", most)
        return f"{lark.mark(section.opens[0])} {calls} {lark.mark(section.close)}"

    def free(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """Return an expression for text with at most ``most`` valid calls."""
        section = self._section
        opens = [f"{lark.text_until(mark)} {lark.mark(section.call)}" for mark in section.opens]
        begin = one_of([*opens, lark.text_until(section.call)])
        return f"({begin} {self._after_mark(lark, tools)} {lark.mark(section.close)}?){{0,{most}}} {TEXT}"

    def answer(self, lark: LarkGrammar, content: str) -> str:
        """Return an expression for an answer whose content is ``content``."""
        del lark
        return content

    def _look_at_head(self, source: Source) -> Reading[re.Match[str] | None]:
        head = yield from source.until(("{", self._section.end_of_call), MAX_HEAD_CHARS)
        return None if head is None else self._section.head.fullmatch(head)

    def _read_arguments(self, source: Source) -> Reading[None]:
        section = self._section
        if (yield from source.follows(section.end_of_call)):
            source.emit(Kind.ARGUMENTS, NO_ARGUMENTS)
        else:
            yield from source.pass_value(Kind.ARGUMENTS)
            if section.fence:
                yield from source.follows(section.fence)
            yield from source.follows(section.end_of_call)
        yield from source.skip_space()

    def _after_mark(self, lark: LarkGrammar, tools: Sequence[Tool]) -> str:
        section = self._section
        calls = [f"{section.write_head(lark, tool.name)} {lark.json(tool.schema)}" for tool in tools]
        after = literal(section.after_arguments) if section.after_arguments else ""
        return f"{one_of(calls)} {after} {lark.mark(section.end_of_call)}"
