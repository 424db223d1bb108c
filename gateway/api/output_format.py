"""Output formats: OpenAI's ``response_format``, and vLLM's ``structured_outputs`` for all else.

Whether a schema, pattern or grammar is a valid one, the worker's engine says: it has the compiler.
"""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from protocol.generation import Grammar


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class JsonSchema(_Part):
    """A named schema. ``strict`` makes no difference: answers follow the schema either way."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(_Part):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("'json_schema' belongs to the type \"json_schema\", and to no other")
        return self

    def grammar(self) -> Grammar | None:
        """The wire form; None for plain text."""
        if self.json_schema is not None:
            return Grammar("json_schema", json.dumps(self.json_schema.schema_))
        return Grammar("json_object", "") if self.type == "json_object" else None


class StructuredOutputs(_Part):
    """vLLM's way to ask for anything; exactly one of the fields."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: Annotated[str | None, Field(min_length=1)] = None
    choice: Annotated[list[str] | None, Field(min_length=1)] = None
    grammar_: Annotated[str | None, Field(alias="grammar", min_length=1)] = None

    @model_validator(mode="after")
    def _has_one(self) -> "StructuredOutputs":
        if (
            sum(value is not None for value in (self.json_, self.json_object, self.regex, self.choice, self.grammar_))
            != 1
        ):
            raise ValueError("give exactly one of 'json', 'json_object', 'regex', 'choice' and 'grammar'")
        return self

    def grammar(self) -> Grammar:
        """The wire form."""
        field = "structured_outputs"
        named = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar_}
        for kind, value in named.items():
            if value is not None:
                return grammar_of(kind, value, field)
        return Grammar("json_object", "", field)


def grammar_of(kind: str, value: dict[str, Any] | list[str] | str, field: str) -> Grammar:
    """The wire form of vLLM's "json", "regex", "choice" or "grammar", asked for by ``field``."""
    if isinstance(value, list):
        return Grammar("regex", "|".join(map(re.escape, value)), field)
    source = value if isinstance(value, str) else json.dumps(value)
    return Grammar({"json": "json_schema", "regex": "regex", "grammar": "lark"}[kind], source, field)
