"""The interface of tool-call formats, one for each family of models."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from msgspec import Struct

from protocol.dialects.lark import LarkGrammar
from protocol.dialects.source import Reading, Source

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments of each tool, by its name

MAX_FORCED_CALLS: Final = 16  # in one answer, by its grammar


class Tool(Struct, frozen=True):
    """A tool that an answer may call."""

    name: str
    schema: dict[str, Any]  # of its arguments, as enforced
    is_strict: bool


class ToolFormat(Protocol):
    """One family's format of tool calls."""

    marks: tuple[str, ...]  # delimiters of calls, which may be special tokens
    reads_reasoning: bool  # whether it parses reasoning too, instead of a separate reasoning format

    def read(self, source: Source, tools: Schemas) -> Reading[None]:
        """Read the complete answer, or what follows its reasoning: content and calls of ``tools``.

        Anything but a well-formed call is content. Ends only with the text.
        """
        ...

    def call_id(self) -> str:
        """Return a new id for a call."""
        ...

    def forced(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """Return an expression for one to ``most`` calls and nothing else."""
        ...

    def free(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """Return an expression for any text in which every begun call is valid, with at most ``most`` calls."""
        ...

    def answer(self, lark: LarkGrammar, content: str) -> str | None:
        """Return an expression for an answer whose content is ``content``; None if that may look like a call."""
        ...
