"""Common parts of the grammars of families that begin every call with a mark."""

import secrets
from collections.abc import Sequence

from protocol.dialects.base import Tool
from protocol.dialects.lark import TEXT, LarkGrammar, literal, one_of


def new_call_id() -> str:
    """Return an id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def repeated(expression: str, separator: str, most: int) -> str:
    """Return an expression for one to ``most`` repetitions of another."""
    return expression if most == 1 else f"{expression} ({separator} {expression}){{0,{most - 1}}}"


def json_calls(lark: LarkGrammar, tools: Sequence[Tool], arguments_key: str = "arguments") -> str:
    """Return an expression for a call of any of ``tools`` as a JSON object, spaced like ``json.dumps``."""
    heads = [f'{{"name": "{tool.name}", "{arguments_key}": ' for tool in tools]
    return one_of(
        [f"{literal(head)} {lark.json(tool.schema)} {literal('}')}" for head, tool in zip(heads, tools, strict=True)]
    )


def free_text(lark: LarkGrammar, mark: str, after_mark: str, most: int) -> str:
    """Return an expression for any text in which ``after_mark`` follows each ``mark``, at most ``most`` times."""
    return f"({lark.text_until(mark)} {after_mark}){{0,{most}}} {TEXT}"
