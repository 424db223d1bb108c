"""OpenAI's harmony format (gpt-oss), in which an answer is a series of messages on channels.

    <|channel|>analysis<|message|>The user wants …<|end|>
    <|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"zone": "UTC"}<|call|>

without the line ends. Analysis is reasoning; the final channel, and commentary without a recipient, are content. The
prompt ends in ``<|start|>assistant``, and the tokens that end a turn are not part of the text.
"""

import re
from collections.abc import Collection, Sequence
from typing import Final

from protocol.dialects.base import Schemas, Tool
from protocol.dialects.lark import TEXT, LarkGrammar, literal, one_of
from protocol.dialects.marked import new_call_id
from protocol.dialects.source import Kind, Reading, Source

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
MAX_HEADER_CHARS: Final = 256
_ENDS: Final = (END, "<|call|>", "<|return|>")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([\w.-]+)")
_FUNCTIONS: Final = "functions."


class HarmonyFormat:
    """The harmony format of calls and reasoning."""

    marks: tuple[str, ...] = (START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS)
    reads_reasoning = True

    def read(self, source: Source, tools: Schemas) -> Reading[None]:
        """Read content and calls of ``tools`` to the end of the text."""
        while (yield from source.peek()):
            header = yield from source.until((MESSAGE,), MAX_HEADER_CHARS)
            if header is None or CHANNEL not in header:
                yield from source.pass_until((), Kind.CONTENT)
                return
            source.at += len(MESSAGE)
            kind = _kind_of(source, header, tools)
            yield from source.skip_space()
            yield from source.pass_until(_ENDS, kind)
            yield from source.skip_space()

    def call_id(self) -> str:
        """Return a new id for a call."""
        return new_call_id()

    def forced(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """Return an expression for one to ``most`` calls. One call: its token ends the turn."""
        del most
        return f"{_analysis(lark)} {_calls(lark, tools)}"

    def free(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """Return an expression for text with at most ``most`` valid calls."""
        del most
        preamble = _message(lark, "commentary", f"{TEXT} {_next(lark)}")
        return f"{_analysis(lark)} {preamble}? ({_calls(lark, tools)} | {_message(lark, 'final', TEXT)})"

    def answer(self, lark: LarkGrammar, content: str) -> str:
        """Return an expression for an answer whose content is ``content``."""
        return f"{_analysis(lark)} {_message(lark, 'final', content)}"


def _kind_of(source: Source, header: str, names: Collection[str]) -> Kind:
    """Return a message's kind by its header; emit the beginning of a call."""
    channel = _CHANNEL.search(header)
    recipient = _RECIPIENT.search(header)
    if recipient is not None and recipient[1].startswith(_FUNCTIONS) and names:
        source.emit(Kind.CALL, recipient[1].removeprefix(_FUNCTIONS))
        return Kind.ARGUMENTS
    if recipient is not None or (channel is not None and channel[1] == "analysis"):
        return Kind.REASONING  # also messages to the model's built-in tools, which do not exist here
    return Kind.CONTENT


def _message(lark: LarkGrammar, header: str, body: str) -> str:
    return f"({lark.mark(CHANNEL)} {literal(header)} {lark.mark(MESSAGE)} {body})"


def _next(lark: LarkGrammar) -> str:
    return f"{lark.mark(END)} {lark.mark(START)} {literal('assistant')}"


def _analysis(lark: LarkGrammar) -> str:
    return f"{_message(lark, 'analysis', f'{TEXT} {_next(lark)}')}?"


def _calls(lark: LarkGrammar, tools: Sequence[Tool]) -> str:
    after = f"{literal(' ')} {lark.mark(CONSTRAIN)} {literal('json')} {lark.mark(MESSAGE)}"
    to = f"{lark.mark(CHANNEL)} {literal('commentary to=' + _FUNCTIONS)}"
    calls = [f"{literal(tool.name)} {after} {lark.json(tool.schema)}" for tool in tools]
    return f"({to} {one_of(calls)})"
