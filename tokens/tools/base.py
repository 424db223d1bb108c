"""The plug point for families of models: how one writes calls of tools."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from msgspec import Struct

from tokens.tools.lark import LarkGrammar
from tokens.tools.source import Reading, Source

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments of each tool, by its name

MAX_FORCED_CALLS: Final = 16  # that a grammar lets an answer hold


class Tool(Struct, frozen=True):
    """A tool that an answer may call."""

    name: str
    schema: dict[str, Any]  # of its arguments, as they are to be forced
    is_strict: bool


class ToolFormat(Protocol):
    """One family's way to write calls."""

    marks: tuple[str, ...]  # that frame calls, and may be special tokens
    reads_reasoning: bool  # whether it reads reasoning too, which is then nobody else's

    def read(self, source: Source, tools: Schemas) -> Reading[None]:
        """Read the whole answer, or what follows its reasoning: content and calls of ``tools``.

        What is no well-formed call is content. Ends with the text only.
        """
        ...

    def call_id(self) -> str:
        """A new id for a call."""
        ...

    def forced(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """An expression for one to ``most`` calls and nothing else."""
        ...

    def free(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """An expression for any text in which each call that begins is a valid one, of at most ``most``."""
        ...

    def answer(self, lark: LarkGrammar, content: str) -> str | None:
        """An expression for an answer whose content is ``content``; None where that may look like a call."""
        ...
