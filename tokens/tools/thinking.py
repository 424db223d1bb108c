"""Reasoning at the beginning of an answer, between two marks. Some templates open it already in the prompt."""

from dataclasses import dataclass

from tokens.tools.lark import SPACE, LarkGrammar
from tokens.tools.source import Kind, Reading, Source


@dataclass(frozen=True)
class Thinking:
    """One family's marks."""

    open: str
    close: str
    ended_by: tuple[str, ...] = ()  # marks of calls, which some models write without closing their reasoning

    def is_open_after(self, prompt: str) -> bool:
        """Whether an answer to this prompt, or to one that ends like it, begins inside its reasoning."""
        return prompt.rstrip().endswith(self.open)

    def read(self, source: Source, *, is_open: bool) -> Reading[None]:
        """Read the reasoning, if there is any, and its marks."""
        has_mark = yield from source.follows(self.open)
        if not (has_mark or is_open):
            return
        yield from source.skip_space()
        if (yield from source.pass_until((self.close, *self.ended_by), Kind.REASONING)) == self.close:
            yield from source.skip_space()
        source.at = 0  # another mark is for who reads on

    def before(self, lark: LarkGrammar, *, is_open: bool) -> str:
        """An expression for what may stand before an answer, or must where the prompt has begun it."""
        rest = lark.text_until(self.close)
        return f"{rest} {SPACE}" if is_open else f"({lark.mark(self.open)} {rest} {SPACE})?"
