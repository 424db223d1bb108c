"""Tools in the prompt and the parsing of answers, from a chat body and its model's dialect."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from gateway.api.json_schema import enforceable_schema
from gateway.api.schema import ChatCompletionRequest
from gateway.api.schema_check import SchemaCheck
from gateway.api.tool_fields import NamedTool, ToolDefinition, callable_tools
from gateway.errors import InvalidParameter
from gateway.tokenizing.model_tokens import ModelTokens
from gateway.tokenizing.schema_keywords import SchemaReader
from protocol.dialects.dialect import PLAIN, AnswerForm
from protocol.generation import Grammar

_UNSUPPORTED: Final = "unsupported_parameter"


def tools_for_template(tokens: ModelTokens, tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    """Return the tools as the model's chat template expects them. Raises InvalidParameter if they cannot be told."""
    if tools and not tokens.describes_tools:
        text = (
            f"The chat template of the model {tokens.model} does not know tools, and models.{tokens.model}.tool_parser"
            " says that they are not described otherwise."
        )
        raise InvalidParameter(text, param="tools", code=_UNSUPPORTED)
    return [tool.for_template() for tool in tools]


def tools_for_prompt(request: ChatCompletionRequest) -> Sequence[ToolDefinition]:
    """Return the tools for the prompt: none where the model must not call any."""
    return () if request.tool_choice == "none" else request.tools or ()


def template_variables(tokens: ModelTokens, request: ChatCompletionRequest) -> dict[str, Any]:
    """The variables of the chat template: the caller's own, and the effort where the template reads it.

    For all other models an effort is a wish that they cannot have an ear for. Raises InvalidParameter for two efforts.
    """
    variables = dict(request.chat_template_kwargs or {})
    name = "reasoning_effort"
    if request.reasoning_effort is None or not tokens.template_reads(name):
        return variables
    if name in variables:
        raise InvalidParameter(f"'{name}' is set twice.", param=f"chat_template_kwargs.{name}")
    return {**variables, name: request.reasoning_effort}


def answer_form(tokens: ModelTokens, request: ChatCompletionRequest, prompt_ids: list[int]) -> AnswerForm | None:
    """Return how to parse the answers; None for plain text. Raises InvalidParameter for tools that cannot be called."""
    tools, dialect = tools_for_prompt(request), tokens.dialect
    if tools and (dialect is None or not dialect.takes_tools):
        text = f"How the model {tokens.model} writes calls is not known (models.{tokens.model}.tool_parser)."
        raise InvalidParameter(text, param="tools", code=_UNSUPPORTED)
    if dialect is None or not (tools or dialect.has_reasoning):
        return None
    return AnswerForm(
        dialect,
        callable_tools(tools, request.tool_choice),
        is_single_call=isinstance(request.tool_choice, NamedTool) or request.parallel_tool_calls is False,
        is_legacy=request.is_legacy,
        begins_in_reasoning=dialect.thinking is not None and dialect.thinking.is_open_after(tokens.end_of(prompt_ids)),
    )


def form_of_parts(request: ChatCompletionRequest) -> AnswerForm:
    """Return the form of answers that come in parts, or as plain text."""
    is_single_call = isinstance(request.tool_choice, NamedTool) or request.parallel_tool_calls is False
    return AnswerForm(PLAIN, (), is_single_call=is_single_call, is_legacy=request.is_legacy)


def must_call(request: ChatCompletionRequest) -> bool:
    """Report whether the answer must be a call."""
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)


def grammar_of(
    form: AnswerForm, request: ChatCompletionRequest, content: Grammar | None, check: SchemaCheck | None
) -> Grammar | None:
    """Return the grammar that forces the answers; ``content``: the grammar of those that are no calls.

    Raises InvalidParameter where calls and other output cannot be distinguished, and for what ``json_schema``
    refuses.
    """
    is_forced = must_call(request)
    place = "functions.{}.parameters" if form.is_legacy else "tools.{}.function.parameters"
    paths = {tool.function.name: place.format(at) for at, tool in enumerate(request.tools or ())}
    tools = tuple(
        replace(
            tool, schema=enforceable_schema(tool.schema, SchemaReader(paths.get(tool.name, "tools")), check, tool.name)
        )
        if is_forced or tool.is_strict
        else tool
        for tool in form.tools
    )
    try:
        return dataclasses.replace(form, tools=tools).grammar(must_call=is_forced, content=content)
    except ValueError as error:
        field = content.field if content is not None and not is_forced else "tools"
        raise InvalidParameter(f"'{field}' cannot be honoured here: {error}.", param=field) from error
