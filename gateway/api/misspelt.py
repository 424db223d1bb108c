"""Unknown fields of a body that resemble a known field, and so are probably misspelled.

Other unknown fields are ignored (docs/reference/api.md).
"""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Final

from gateway.api.fields import Body
from gateway.errors import InvalidParameter

MAX_COMPARED: Final = 8  # unknown fields of one body
MAX_REMEMBERED: Final = 1024  # comparisons; SDKs send the same unknown fields with each request
MIN_SIMILARITY: Final = (
    0.82  # ratio; `max_new_tokens` resembles `max_tokens`, `chat_template` does not resemble `chat_template_kwargs`
)
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{1,63}")  # only names that fit into a header


def misspelt_fields(body: Body) -> Mapping[str, str]:
    """Return the unknown fields of a body, each with the known field that it resembles."""
    return dict(_misspelt(body)) if body.model_extra else {}


def _misspelt(body: Body) -> Iterator[tuple[str, str]]:
    names = (name for name in body.model_extra or {} if _NAME.fullmatch(name))
    for _, name in zip(range(MAX_COMPARED), names, strict=False):
        known = _nearest(type(body), name)
        if known is not None and known not in body.model_fields_set:
            yield name, known


@lru_cache(MAX_REMEMBERED)
def _nearest(kind: type[Body], name: str) -> str | None:
    known = {_plain(field): field for field in kind.model_fields}
    near = get_close_matches(_plain(name), known, n=1, cutoff=MIN_SIMILARITY)
    return known[near[0]] if near else None


def _plain(name: str) -> str:
    """Return a name without its case style: ``maxTokens`` and ``max-tokens`` equal ``max_tokens``."""
    return re.sub("[_-]", "", name).lower()


def ignored_names(misspelt: Mapping[str, str]) -> set[str]:
    """Return the entries of ``x-spillway-adapted`` for misspelled fields."""
    return {f"field-ignored:{name};did-you-mean={known}" for name, known in misspelt.items()}


def refuse_misspelt(misspelt: Mapping[str, str]) -> None:
    """Raise InvalidParameter for the first misspelled field."""
    for name, known in misspelt.items():
        raise InvalidParameter(
            f"Unknown parameter: '{name}'. Did you mean '{known}'?", param=name, code="unknown_parameter"
        )
