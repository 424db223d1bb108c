"""Check bodies and events of Anthropic's Messages API with the types of the ``anthropic`` package."""

from typing import Any, Final, get_type_hints

from anthropic.types import MessageParam, RawMessageStreamEvent, TextBlockParam, ToolChoiceParam, ToolParam
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from anthropic.types.output_config_param import OutputConfigParam
from anthropic.types.thinking_config_param import ThinkingConfigParam
from pydantic import TypeAdapter

FIELDS: Final = frozenset(get_type_hints(MessageCreateParamsStreaming))
TYPES: Final[dict[str, TypeAdapter[Any]]] = {
    "messages": TypeAdapter(list[MessageParam]),
    "system": TypeAdapter(list[TextBlockParam]),
    "tools": TypeAdapter(list[ToolParam]),
    "tool_choice": TypeAdapter(ToolChoiceParam),
    "thinking": TypeAdapter(ThinkingConfigParam),
    "output_config": TypeAdapter(OutputConfigParam),
}
EVENT: Final = TypeAdapter(RawMessageStreamEvent)
