"""gpt-oss: OpenAI's harmony, where an answer is messages on channels.

    <|channel|>analysis<|message|>The user wants …<|end|>
    <|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"zone": "UTC"}<|call|>

without the line ends. Analysis is reasoning; what is on the final channel, or on commentary for nobody, is content. The
prompt ends in ``<|start|>assistant``, and the tokens that end a turn are not part of the text.
"""

import re
from collections.abc import Collection, Sequence
from typing import Final

from tokens.tools.base import Schemas, Tool
from tokens.tools.lark import TEXT, LarkGrammar, literal, one_of
from tokens.tools.marked import new_call_id
from tokens.tools.source import Kind, Reading, Source

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
    """See the module and ToolFormat."""

    marks: tuple[str, ...] = (START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS)
    reads_reasoning = True

    def read(self, source: Source, tools: Schemas) -> Reading[None]:
        """See ToolFormat."""
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
        """See ToolFormat."""
        return new_call_id()

    def forced(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """See ToolFormat. One call: its token ends the turn."""
        del most
        return f"{_analysis(lark)} {_calls(lark, tools)}"

    def free(self, lark: LarkGrammar, tools: Sequence[Tool], *, most: int) -> str:
        """See ToolFormat."""
        del most
        preamble = _message(lark, "commentary", f"{TEXT} {_next(lark)}")
        return f"{_analysis(lark)} {preamble}? ({_calls(lark, tools)} | {_message(lark, 'final', TEXT)})"

    def answer(self, lark: LarkGrammar, content: str) -> str:
        """See ToolFormat."""
        return f"{_analysis(lark)} {_message(lark, 'final', content)}"


def _kind_of(source: Source, header: str, names: Collection[str]) -> Kind:
    """What a message is, by its header; a call is told to begin."""
    channel = _CHANNEL.search(header)
    recipient = _RECIPIENT.search(header)
    if recipient is not None and recipient[1].startswith(_FUNCTIONS) and names:
        source.tell(Kind.CALL, recipient[1].removeprefix(_FUNCTIONS))
        return Kind.ARGUMENTS
    if recipient is not None or (channel is not None and channel[1] == "analysis"):
        return Kind.REASONING  # also what is for a tool of the model's own, which is not here
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
