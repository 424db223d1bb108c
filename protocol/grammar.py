"""Constraints that clients may put on an answer's form."""

from msgspec import Struct


class Grammar(Struct, frozen=True, omit_defaults=True):
    """The form that every answer must have."""

    kind: str  # "json_schema" | "json_object" | "regex" | "lark"
    source: str  # empty for json_object
    field: str = "response_format"  # of the request: who asked for it, for errors
    is_optional: bool = False  # nobody asked for it: an engine that cannot follow it goes without
