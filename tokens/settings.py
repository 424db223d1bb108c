"""What the configuration says of a model's tokens."""

from collections.abc import Collection, Mapping
from typing import Annotated

from pydantic import AfterValidator

from protocol.settings import PositiveInt, Settings
from tokens.tools.registry import NONE, REASONING_FORMATS, TOOL_FORMATS


def _one_of(known: Collection[str]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in known and name != NONE:
            raise ValueError(f"{name!r} is not known; there are: {', '.join([*known, NONE])}")
        return name

    return AfterValidator(check)


class ModelTokenSettings(Settings):
    """How callers name one model, how its prompts are counted, and how its answers are read."""

    context_length: PositiveInt | None = None  # prompt + output tokens; default: what the workers' model card says
    tokenizer: str | None = None  # a tokenizer.json, a folder with one, or "tiktoken:<encoding>"; default: the workers'
    aliases: tuple[str, ...] = ()  # other names callers may use
    owned_by: str = "spillway"
    default_max_tokens: PositiveInt | None = None  # where the caller names none; default: what the context leaves
    # How answers write calls of tools and reasoning, or "none"; default: what the chat template looks like.
    tool_parser: Annotated[str, _one_of(TOOL_FORMATS)] | None = None
    reasoning_parser: Annotated[str, _one_of(REASONING_FORMATS)] | None = None
    # Whether the text of a control token in a message becomes the token. Then a caller can forge turns of others.
    control_tokens_in_content: bool = False
    # Whether keywords of JSON schemas that no grammar can enforce ("not", "uniqueItems", …) are checked when an answer
    # has been made, not refused.
    lenient_schemas: bool = False


def canonical_names(models: Mapping[str, ModelTokenSettings]) -> dict[str, str]:
    """The model behind every name and alias."""
    return {name: model for model, settings in models.items() for name in (model, *settings.aliases)}
