"""The messages of a conversation: as callers write them, and as chat templates expect them."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from gateway.api.fields import Body, refuse_unsupported
from gateway.api.tool_fields import MAX_CALLS, CalledFunction, ToolCall
from gateway.errors import InvalidParameter
from protocol.job import Call, Turn

_UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {"audio": ()}
_TEXT_OF_PART: Final = {"text": "text", "refusal": "refusal"}  # the types of parts that are text, and where it stands
# Legacy functions have no ids; nine letters, because Mistral's templates want so many.
_LEGACY_CALL_ID: Final = "function1"

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


def _text_of(content: object) -> object:
    """A message's content as one string: a string, or a list of parts that are text."""
    if not isinstance(content, list):
        return content
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise ValueError(f"part {number} must be an object with a type")  # noqa: TRY004  # pydantic wants ValueError
        text = part.get(_TEXT_OF_PART.get(part["type"], ""))
        if not isinstance(text, str):
            raise ValueError(f"part {number} is of type {part['type']!r}; only text parts are supported")  # noqa: TRY004
        texts.append(text)
    return "\n".join(texts)


class Message(Body):
    """One turn of a conversation."""

    role: Role
    content: Annotated[str | None, BeforeValidator(_text_of, str | list[dict[str, Any]] | None)] = Field(
        default=None, validate_default=True
    )
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(max_length=MAX_CALLS)] = None
    function_call: CalledFunction | None = None  # what tool_calls were before
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same under its other name
    refusal: str | None = None  # an assistant's, instead of content

    @field_validator("content")
    @classmethod
    def _only_some_may_be_silent(cls, content: str | None, info: ValidationInfo) -> str | None:
        if content is None and info.data.get("role") not in {"assistant", "function"}:
            raise ValueError("must be a string or a list of text parts")
        return content

    @property
    def called(self) -> list[CalledFunction]:
        """The calls of tools."""
        legacy = [] if self.function_call is None else [self.function_call]
        return [call.function for call in self.tool_calls] if self.tool_calls else legacy

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it; they know "developer" and "function" by other names."""
        message: dict[str, Any] = {
            "role": {"developer": "system", "function": "tool"}.get(self.role, self.role),
            "content": self.content or self.refusal or "",
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        elif self.function_call is not None:
            message["tool_calls"] = [ToolCall(id=_LEGACY_CALL_ID, function=self.function_call).for_template()]
        if self.tool_call_id is not None or self.role == "function":
            message["tool_call_id"] = self.tool_call_id or _LEGACY_CALL_ID
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:  # templates have three names for it
            message.update(reasoning_content=reasoning, reasoning=reasoning, thinking=reasoning)
        return message

    def for_job(self) -> Turn:
        """The message as jobs carry it to pools that take messages; older forms of tools are calls there."""
        fields = self.for_template()
        calls = tuple(
            Call(call["id"], call["function"]["name"], function.arguments_object)
            for call, function in zip(fields.get("tool_calls", ()), self.called, strict=True)
        )
        role = "developer" if self.role == "developer" else fields["role"]
        reasoning = self.reasoning_content or self.reasoning
        return Turn(role, self.content, self.name, calls, fields.get("tool_call_id"), reasoning)


def check_message(message: Message, prefix: str) -> None:
    """Refuse fields that the message's role does not have. Raises InvalidParameter."""
    refuse_unsupported(message, _UNSUPPORTED, prefix=prefix)
    for name in ("tool_calls", "function_call"):
        if getattr(message, name) and message.role != "assistant":
            raise InvalidParameter("Only an assistant calls tools.", param=f"{prefix}{name}")
    if (message.tool_call_id is None) == (message.role == "tool"):
        text = "A message has a 'tool_call_id' if it is of the role \"tool\", and only then."
        raise InvalidParameter(text, param=f"{prefix}tool_call_id")
    if message.role == "function" and not message.name:
        raise InvalidParameter("The result of a function needs its 'name'.", param=f"{prefix}name")
