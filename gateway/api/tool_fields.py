"""Fields of a chat body about tools: those that may be called, and earlier calls."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from gateway.errors import InvalidParameter
from gateway.tokenizing.turns import Arguments
from protocol.dialects.base import Tool
from protocol.dialects.calls import HELD_TEXT, arguments_of

MAX_TOOLS: Final = 128
MAX_TOOLS_BYTES: Final = 512 * 1024  # of all of them, as JSON
MAX_CALLS: Final = 128  # in one message of a conversation
NO_PARAMETERS: Final = {"type": "object", "properties": {}}
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class FunctionDefinition(_Part):
    """A function's description for the model, and whether its arguments must follow their schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(_Part):
    """One of a request's ``tools``."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it. Whether it is strict is no business of the model's."""
        function = self.function.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        function.setdefault("parameters", NO_PARAMETERS)
        return {"type": "function", "function": function}


class NamedFunction(_Part):
    """A function, by its name."""

    name: str


class NamedTool(_Part):
    """``tool_choice``: this tool and no other."""

    type: Literal["function"]
    function: NamedFunction


def _known_choice(choice: object) -> object:
    # One message for what a union would explain as several.
    is_named = isinstance(choice, Mapping) and choice.get("type") == "function" and "function" in choice
    if choice is None or is_named or choice in ("none", "auto", "required"):
        return choice
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}')


def _known_function(choice: object) -> object:
    if choice in (None, "none", "auto") or (isinstance(choice, Mapping) and isinstance(choice.get("name"), str)):
        return choice
    raise ValueError('must be "none", "auto" or {"name": …}')


FunctionChoice = Annotated[Literal["none", "auto"] | NamedFunction | None, BeforeValidator(_known_function)]
ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool | None, BeforeValidator(_known_choice)]


def _as_text(arguments: object) -> str:
    """Some clients send the object itself, or null."""
    if arguments is None or isinstance(arguments, str):
        return arguments or ""
    return json.dumps(arguments, ensure_ascii=False)


class CalledFunction(_Part):
    """An assistant's call, with its arguments as JSON text."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[str, BeforeValidator(_as_text, str | dict[str, Any] | None)] = ""

    def arguments_for_template(self) -> Arguments:
        """The arguments as an object, which templates expect.

        Models write what is no object, or are cut off in it. Then an object holds the text: the conversation goes on.
        """
        found = arguments_of(self.arguments)
        return Arguments({HELD_TEXT: self.arguments} if found is None else found)

    @property
    def arguments_object(self) -> str:
        """The arguments as the JSON of an object, in the same way."""
        is_object = arguments_of(self.arguments) is not None
        return self.arguments.strip() if is_object else json.dumps({HELD_TEXT: self.arguments}, ensure_ascii=False)


class ToolCall(_Part):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates expect it."""
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
    """Refuse tools that contradict each other or ``tool_choice``. Raises InvalidParameter."""
    if not tools and choice not in {None, "none", "auto"}:
        raise InvalidParameter("There are no 'tools' of which one must be called.", param="tool_choice")
    names = [tool.function.name for tool in tools]
    for number, tool in enumerate(tools):
        prefix = f"tools.{number}.function"
        if names.index(tool.function.name) != number:
            raise InvalidParameter(f"'{tool.function.name}' is the name of two tools.", param=f"{prefix}.name")
        if (tool.function.parameters or {}).get("type", "object") != "object":
            raise InvalidParameter("The type of 'parameters' must be \"object\".", param=f"{prefix}.parameters")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise InvalidParameter(f"'{choice.function.name}' is none of 'tools'.", param="tool_choice")
    size = sum(len(tool.model_dump_json()) for tool in tools)
    if size > MAX_TOOLS_BYTES:
        raise InvalidParameter(f"'tools' may have at most {MAX_TOOLS_BYTES} bytes, not {size}.", param="tools")


def callable_tools(tools: Sequence[ToolDefinition], choice: object) -> tuple[Tool, ...]:
    """The tools that an answer may call, with the schemas of their arguments, which are objects in any case."""
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
