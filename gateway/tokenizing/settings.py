"""Configuration of a model's tokens."""

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator

from protocol.dialects.registry import NONE, REASONING_FORMATS, TOOL_FORMATS
from protocol.process import PositiveInt, Settings


def _one_of(known: Collection[str]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in known and name != NONE:
            raise ValueError(f"{name!r} is unknown; known names: {', '.join([*known, NONE])}")
        return name

    return AfterValidator(check)


class ModelTokenSettings(Settings):
    """One model's names, tokenizer and limits, and the formats of its answers."""

    context_length: PositiveInt | None = None  # prompt + output tokens; default: the workers' model card's
    tokenizer: str | None = None  # a tokenizer.json, a folder with one, or "tiktoken:<encoding>"; default: the workers'
    aliases: tuple[str, ...] = ()  # other names for it in requests
    owned_by: str = "spillway"
    default_max_tokens: PositiveInt | None = None  # if the request has none; default: the rest of the context
    # The formats of tool calls and reasoning in answers, or "none"; default: detected from the chat template.
    tool_parser: Annotated[str, _one_of(TOOL_FORMATS)] | None = None
    reasoning_parser: Annotated[str, _one_of(REASONING_FORMATS)] | None = None
    # Whether the text of a control token in a message becomes the token. Then a client can forge turns.
    control_tokens_in_content: bool = False
    # Whether keywords of JSON schemas that no grammar can enforce ("not", "uniqueItems", …) are checked after an
    # answer is generated, instead of being refused.
    lenient_schemas: bool = False
    # Whether its generation_config.json has the defaults of omitted sampling parameters.
    generation_config: Literal["auto", "ignore"] = "auto"


def canonical_names(models: Mapping[str, ModelTokenSettings]) -> dict[str, str]:
    """Return the model of every name and alias."""
    return {name: model for model, settings in models.items() for name in (model, *settings.aliases)}
