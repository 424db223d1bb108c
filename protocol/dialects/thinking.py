"""Reasoning at the beginning of an answer, between two marks. Some templates open it in the prompt."""

from dataclasses import dataclass

from protocol.dialects.lark import SPACE, LarkGrammar
from protocol.dialects.source import Kind, Reading, Source


@dataclass(frozen=True)
class Thinking:
    """One family's marks of reasoning."""

    open: str
    close: str
    ended_by: tuple[str, ...] = ()  # marks of calls, which some models write before closing the reasoning

    def is_open_after(self, prompt: str) -> bool:
        """Report whether an answer to a prompt that ends like this begins inside its reasoning."""
        return prompt.rstrip().endswith(self.open)

    def read(self, source: Source, *, is_open: bool) -> Reading[None]:
        """Read the reasoning, if any, and its marks."""
        has_mark = yield from source.follows(self.open)
        if not (has_mark or is_open):
            return
        yield from source.skip_space()
        if (yield from source.pass_until((self.close, *self.ended_by), Kind.REASONING)) == self.close:
            yield from source.skip_space()
        source.at = 0  # leave another mark to the next reader

    def before(self, lark: LarkGrammar, *, is_open: bool) -> str:
        """Return an expression for reasoning before an answer: optional, or required if the prompt has opened it."""
        rest = lark.text_until(self.close)
        return f"{rest} {SPACE}" if is_open else f"({lark.mark(self.open)} {rest} {SPACE})?"
