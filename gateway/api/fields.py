"""Base class of request bodies, and the error for the first invalid field."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, from_json

from gateway.errors import InvalidParameter, MalformedJson
from gateway.tokenizing.turns import Arguments
from protocol.dialects.base import Tool
from protocol.dialects.calls import HELD_TEXT, arguments_of
from protocol.generation import Grammar
from protocol.job import Call, Turn

MAX_SEARCHED_VALUES: Final = 10_000  # searched to find the field of an invalid number: a few milliseconds
MAX_NAME_CHARS: Final = 100  # of a field name in an error
_ALTERNATIVE: Final = re.compile(
    r"^(str|int|float|bool|[A-Z][A-Za-z]*|[a-z-]+\[.*\])$"
)  # an alternative of a union, not a field

_decode_json = msgspec.json.Decoder().decode
encode_json = msgspec.json.Encoder().encode


class Body(BaseModel):
    """Base of request bodies. Types are strict; unknown fields are kept to find misspelled ones."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


AnyBody = TypeVar("AnyBody", bound=Body)


class BadItem(ValueError):
    """An item of a list is invalid."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def refuse_unsupported(body: Body, unsupported: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Raise InvalidParameter for unsupported fields, unless the value is the default behavior."""
    refuse_fields(body.model_extra or {}, unsupported, prefix)


def refuse_fields(fields: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Do the same as ``refuse_unsupported`` for an object without a model."""
    for field, value in fields.items():
        if field in unsupported and value is not None and value not in unsupported[field]:
            param = prefix + field
            raise InvalidParameter(f"'{param}' is not supported.", param=param, code="unsupported_parameter")


def parse_body(kind: type[AnyBody], body: bytes) -> AnyBody:
    """Validate a body. Raises MalformedJson or InvalidParameter.

    pydantic accepts NaN, Infinity, and 1e400, which are not valid JSON; msgspec, the other parser of bodies, does not.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _first_error(error) from error
    try:
        _decode_json(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _not_json(body, error) from error
    return request


def _not_json(body: bytes, error: Exception) -> MalformedJson | InvalidParameter:
    """Return the error for a body that only pydantic accepts as JSON, with the field if it is found quickly."""
    places: list[tuple[str, Any]] = [("", from_json(body))]
    for _ in range(MAX_SEARCHED_VALUES):
        if not places:
            break
        param, value = places.pop()
        if isinstance(value, float) and not math.isfinite(value):
            message = f"Invalid value for '{param}': NaN, Infinity, and numbers beyond 1.8e308 are not valid JSON."
            return InvalidParameter(message, param=param)
        if isinstance(value, Mapping):
            places += [(f"{param}.{name[:MAX_NAME_CHARS]}".lstrip("."), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            places += [(f"{param}.{number}", inner) for number, inner in enumerate(value[:MAX_SEARCHED_VALUES])]
    return MalformedJson(f"We could not parse the JSON body of your request: {error}")


def _nearest(errors: Sequence[ErrorDetails]) -> ErrorDetails:
    """Return the first error; for a union, the error of the alternative that matched furthest."""
    place = errors[0]["loc"]
    before = next((number for number, part in enumerate(place) if _ALTERNATIVE.match(str(part))), None)
    if before is None:
        return errors[0]
    return max((one for one in errors if one["loc"][:before] == place[:before]), key=lambda one: len(one["loc"]))


def _first_error(error: ValidationError) -> MalformedJson | InvalidParameter:
    details = _nearest(error.errors(include_url=False, include_input=False))
    kind, message = details["type"], details["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return MalformedJson(f"We could not parse the JSON body of your request: {message}")
    param = ".".join(str(part) for part in details["loc"] if not _ALTERNATIVE.match(str(part)))
    if not param:
        return InvalidParameter("The body must be a JSON object.", code="invalid_type")
    reason = details.get("ctx", {}).get("error")
    if isinstance(reason, BadItem):
        param = f"{param}[{reason.number}]"
    if kind == "missing":
        return InvalidParameter(
            f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
        )
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return InvalidParameter(f"Invalid value for '{param}': {message}", param=param, code=code)


# --- tool fields ------------------------------------------------------------------------------------------------------
#
# Fields of a chat body about tools and earlier calls.

MAX_TOOLS: Final = 128
MAX_TOOLS_BYTES: Final = 512 * 1024  # of all tools together, as JSON
MAX_CALLS: Final = 128  # per message
NO_PARAMETERS: Final = {"type": "object", "properties": {}}
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class _ToolPart(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class FunctionDefinition(_ToolPart):
    """A function that the model can call. With ``strict``, its arguments follow the schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(_ToolPart):
    """An element of ``tools``."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it, without ``strict``."""
        function = self.function.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        function.setdefault("parameters", NO_PARAMETERS)
        return {"type": "function", "function": function}


class NamedFunction(_ToolPart):
    """A function, referenced by name."""

    name: str


class NamedTool(_ToolPart):
    """``tool_choice`` that forces one tool."""

    type: Literal["function"]
    function: NamedFunction


def _known_choice(choice: object) -> object:
    # One error message instead of one per alternative of the union.
    is_named = isinstance(choice, Mapping) and choice.get("type") == "function" and "function" in choice
    if choice is None or is_named or choice in ("none", "auto", "required"):
        return choice
    raise ValueError('must be "none", "auto", "required", or {"type": "function", "function": {"name": …}}')


def _known_function(choice: object) -> object:
    if choice in (None, "none", "auto") or (isinstance(choice, Mapping) and isinstance(choice.get("name"), str)):
        return choice
    raise ValueError('must be "none", "auto", or {"name": …}')


FunctionChoice = Annotated[Literal["none", "auto"] | NamedFunction | None, BeforeValidator(_known_function)]
ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool | None, BeforeValidator(_known_choice)]


def _as_text(arguments: object) -> str:
    """Accept an object or null, which some clients send instead of text."""
    if arguments is None or isinstance(arguments, str):
        return arguments or ""
    return json.dumps(arguments, ensure_ascii=False)


class CalledFunction(_ToolPart):
    """A function call by the assistant, with its arguments as JSON text."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[str, BeforeValidator(_as_text, str | dict[str, Any] | None)] = ""

    def arguments_for_template(self) -> Arguments:
        """Return the arguments as the object that templates expect.

        Invalid or truncated arguments are wrapped in an object as text, so that the conversation can continue.
        """
        found = arguments_of(self.arguments)
        return Arguments({HELD_TEXT: self.arguments} if found is None else found)

    @property
    def arguments_object(self) -> str:
        """Return the same object as JSON."""
        is_object = arguments_of(self.arguments) is not None
        return self.arguments.strip() if is_object else json.dumps({HELD_TEXT: self.arguments}, ensure_ascii=False)


class ToolCall(_ToolPart):
    """A tool call in an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it."""
        function = {"name": self.function.name, "arguments": self.function.arguments_for_template()}
        return {"id": self.id, "type": "function", "function": function}


def tools_of(functions: Sequence[FunctionDefinition]) -> list[ToolDefinition]:
    """Return legacy functions as tools."""
    return [ToolDefinition(type="function", function=function) for function in functions]


def tool_choice_of(function_call: object) -> object:
    """Return a legacy ``function_call`` as ``tool_choice``."""
    if isinstance(function_call, NamedFunction):
        return NamedTool(type="function", function=function_call)
    return function_call


def check_tools(tools: Sequence[ToolDefinition], choice: object) -> None:
    """Check that tools are consistent with each other and ``tool_choice``. Raises InvalidParameter."""
    if not tools and choice not in {None, "none", "auto"}:
        raise InvalidParameter("'tool_choice' requires a call, but 'tools' is empty.", param="tool_choice")
    names = [tool.function.name for tool in tools]
    for number, tool in enumerate(tools):
        prefix = f"tools.{number}.function"
        if names.index(tool.function.name) != number:
            raise InvalidParameter(f"'{tool.function.name}' is the name of more than one tool.", param=f"{prefix}.name")
        if (tool.function.parameters or {}).get("type", "object") != "object":
            raise InvalidParameter("The type of 'parameters' must be \"object\".", param=f"{prefix}.parameters")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise InvalidParameter(f"'{choice.function.name}' is not one of 'tools'.", param="tool_choice")
    size = sum(len(tool.model_dump_json()) for tool in tools)
    if size > MAX_TOOLS_BYTES:
        raise InvalidParameter(f"'tools' may have at most {MAX_TOOLS_BYTES} bytes, not {size}.", param="tools")


def callable_tools(tools: Sequence[ToolDefinition], choice: object) -> tuple[Tool, ...]:
    """Return the tools that an answer may call, with the schemas of their arguments (always objects)."""
    name = choice.function.name if isinstance(choice, NamedTool) else None
    return tuple(
        Tool(
            tool.function.name,
            {"type": "object", **(tool.function.parameters or NO_PARAMETERS)},
            is_strict=bool(tool.function.strict),
        )
        for tool in tools
        if name in {None, tool.function.name}
    )


# --- output format ----------------------------------------------------------------------------------------------------
#
# Output formats: OpenAI's ``response_format`` and vLLM's ``structured_outputs``.
#
# The worker's engine, which has the compiler, validates schemas, patterns, and grammars.


class _FormatPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class JsonSchema(_FormatPart):
    """A named JSON schema. ``strict`` has no effect: answers always follow the schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(_FormatPart):
    """OpenAI's ``response_format``: text, any JSON object, or a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("'json_schema' is allowed only with type \"json_schema\"")
        return self

    def grammar(self) -> Grammar | None:
        """Return the wire form; None for plain text."""
        if self.json_schema is not None:
            return Grammar("json_schema", json.dumps(self.json_schema.schema_))
        return Grammar("json_object", "") if self.type == "json_object" else None


class StructuredOutputs(_FormatPart):
    """vLLM's ``structured_outputs``. Exactly one field must be set."""

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
            raise ValueError("set exactly one of 'json', 'json_object', 'regex', 'choice', and 'grammar'")
        return self

    def grammar(self) -> Grammar:
        """Return the wire form."""
        field = "structured_outputs"
        named = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar_}
        for kind, value in named.items():
            if value is not None:
                return grammar_of(kind, value, field)
        return Grammar("json_object", "", field)


def grammar_of(kind: str, value: dict[str, Any] | list[str] | str, field: str) -> Grammar:
    """Return the wire form of vLLM's "json", "regex", "choice", or "grammar"; ``field``: the request field."""
    if isinstance(value, list):
        return Grammar("regex", "|".join(map(re.escape, value)), field)
    source = value if isinstance(value, str) else json.dumps(value)
    return Grammar({"json": "json_schema", "regex": "regex", "grammar": "lark"}[kind], source, field)


# --- conversation -----------------------------------------------------------------------------------------------------
#
# The messages of a conversation, as clients send them and as chat templates expect them.

_UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {"audio": ()}
_TEXT_OF_PART: Final = {"text": "text", "refusal": "refusal"}  # types of text parts, with the field of the text
# Legacy functions have no ids. Nine letters, as Mistral's templates require.
_LEGACY_CALL_ID: Final = "function1"

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


def _text_of(content: object) -> object:
    """Return the content of a message (a string or a list of text parts) as one string."""
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
    """A message of a conversation."""

    role: Role
    content: Annotated[str | None, BeforeValidator(_text_of, str | list[dict[str, Any]] | None)] = Field(
        default=None, validate_default=True
    )
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(max_length=MAX_CALLS)] = None
    function_call: CalledFunction | None = None  # legacy form of tool_calls
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # same as reasoning_content
    refusal: str | None = None  # of an assistant, instead of content

    @field_validator("content")
    @classmethod
    def _only_some_may_be_silent(cls, content: str | None, info: ValidationInfo) -> str | None:
        if content is None and info.data.get("role") not in {"assistant", "function"}:
            raise ValueError("must be a string or a list of text parts")
        return content

    @property
    def called(self) -> list[CalledFunction]:
        """Return the tool calls, including a legacy function call."""
        legacy = [] if self.function_call is None else [self.function_call]
        return [call.function for call in self.tool_calls] if self.tool_calls else legacy

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it, with "developer" and "function" renamed."""
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
        if reasoning:  # templates use three names for it
            message.update(reasoning_content=reasoning, reasoning=reasoning, thinking=reasoning)
        return message

    def for_job(self) -> Turn:
        """Return the message in the format of jobs for chat pools; legacy functions become tool calls."""
        fields = self.for_template()
        calls = tuple(
            Call(call["id"], call["function"]["name"], function.arguments_object)
            for call, function in zip(fields.get("tool_calls", ()), self.called, strict=True)
        )
        role = "developer" if self.role == "developer" else fields["role"]
        reasoning = self.reasoning_content or self.reasoning
        return Turn(role, self.content, self.name, calls, fields.get("tool_call_id"), reasoning)


def check_message(message: Message, prefix: str) -> None:
    """Check that the fields match the role. Raises InvalidParameter."""
    refuse_unsupported(message, _UNSUPPORTED, prefix=prefix)
    for name in ("tool_calls", "function_call"):
        if getattr(message, name) and message.role != "assistant":
            raise InvalidParameter("Only assistant messages can contain tool calls.", param=f"{prefix}{name}")
    if (message.tool_call_id is None) == (message.role == "tool"):
        text = "'tool_call_id' is required for role \"tool\" and not allowed for other roles."
        raise InvalidParameter(text, param=f"{prefix}tool_call_id")
    if message.role == "function" and not message.name:
        raise InvalidParameter("A message of role \"function\" requires 'name'.", param=f"{prefix}name")
