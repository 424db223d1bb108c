"""Generation of grammars in llguidance's dialect of Lark (its docs/syntax.md).

A mark may be one token of the vocabulary or several, and llguidance decides by their spelling which added tokens are
special. Therefore both forms are allowed.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

TEXT: Final = "TEXT"  # any text without special tokens
SPACE: Final = "SPACE"
JSON_SPACE: Final = (
    r"[\x20\x0A\x0D\x09]{0,20}"  # between the parts of JSON; bounded, as some models generate it endlessly
)


class LarkGrammar:
    """The rules of one grammar; ``token_ids`` maps marks that are single tokens to their ids."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._token_ids = token_ids
        self._rules = [f"{TEXT}: /(.|\\n)*/", f"{SPACE}: /[ \\t\\r\\n]{{0,16}}/"]

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule; return its name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def mark(self, mark: str) -> str:
        """Return an expression for a mark."""
        token_id = self._token_ids.get(mark)
        return literal(mark) if token_id is None else f"(<[{token_id}]> | {literal(mark)})"

    def text_until(self, mark: str) -> str:
        """Add a rule for any text up to and including the first ``mark``; return its name."""
        spelled = self.rule(f"{TEXT} {literal(mark)}", "[lazy]")
        token_id = self._token_ids.get(mark)
        return spelled if token_id is None else self.rule(f"{TEXT} <[{token_id}]> | {spelled}")

    def json(self, schema: Mapping[str, Any]) -> str:
        """Add a rule for JSON with a schema; return its name. The schema stays a document: its references work."""
        options = {"whitespace_pattern": JSON_SPACE}
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': options})}")

    def source(self, start: str) -> str:
        """Return the complete grammar's source."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"


def literal(text: str) -> str:
    """Return an expression for exactly this text."""
    return json.dumps(text)


def one_of(expressions: Sequence[str]) -> str:
    """Return an expression for any one of several."""
    return f"({' | '.join(expressions)})"
