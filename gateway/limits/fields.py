"""Size limits of fields, other than the prompt, that travel to a worker or are kept beside it."""

from typing import Any, Final

import msgspec

from gateway.errors import InvalidParameter
from protocol.generation import Grammar

MAX_GRAMMAR_CHARS: Final = 200_000  # of a schema, pattern or grammar; the engine takes no more either
MAX_BIASED_TOKENS: Final = 16_384  # named by logit_bias
MAX_OBJECT_BYTES: Final = 64 * 1024  # of metadata, of chat_template_kwargs, as JSON
MAX_NAME_CHARS: Final = 1024  # of what is one name: user
MAX_DETOKENIZED_TOKENS: Final = 131_072  # of one request, during which nothing else can run: 10 ms

SMALLEST_BYTES: Final = MAX_NAME_CHARS  # no smaller body can have a field that is too large

_encode_json = msgspec.json.Encoder().encode


def check_text(text: str | None, param: str, most_chars: int) -> None:
    """Raise InvalidParameter for a text that is too long."""
    if text is not None and len(text) > most_chars:
        raise _too_large(param, f"{most_chars} characters", len(text))


def check_items(count: int, param: str, most_items: int) -> None:
    """Raise InvalidParameter for too many."""
    if count > most_items:
        raise _too_large(param, f"{most_items} items", count)


def check_object(value: dict[str, Any] | None, param: str) -> None:
    """Raise InvalidParameter for an object that is too large as JSON."""
    size = 0 if value is None else len(_encode_json(value))
    if size > MAX_OBJECT_BYTES:
        raise _too_large(param, f"{MAX_OBJECT_BYTES} bytes", size)


def check_grammar(grammar: Grammar) -> None:
    """Raise InvalidParameter for what is too large to be a schema, pattern or grammar."""
    check_text(grammar.source, grammar.field, MAX_GRAMMAR_CHARS)


def _too_large(param: str, most: str, size: int) -> InvalidParameter:
    return InvalidParameter(f"'{param}' may have at most {most}, not {size}.", param=param, code="too_large")
