"""Conversion of request fields to ``Sampling``. Omitted fields keep the defaults of ``Sampling``."""

import dataclasses
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from msgspec.structs import replace

from gateway.api.events import SchemaCheck
from gateway.api.fields import NamedTool, ToolDefinition, callable_tools
from gateway.api.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from gateway.errors import InvalidParameter, Refused
from gateway.request.request import Conversation
from gateway.tokenizing.encoders import TokenizerError
from gateway.tokenizing.model_tokens import ModelTokens
from gateway.tokenizing.schema_keywords import SchemaReader
from protocol.dialects.dialect import PLAIN, AnswerForm
from protocol.generation import Grammar
from protocol.job import THINKING, AnswerSchema, Chat, Sampling, Tool, encode_chat

# --- json schema ------------------------------------------------------------------------------------------------------
#
# JSON schema keywords that a grammar cannot enforce: refused, or validated after generation if lenient.


def enforceable(grammar: Grammar | None, check: SchemaCheck | None) -> Grammar | None:
    """Return the enforceable part of a grammar. ``check`` gets the rest; if it is None, raises InvalidParameter."""
    if grammar is None or grammar.kind != "json_schema":
        return grammar
    try:
        schema = json.loads(grammar.source)
    except (ValueError, RecursionError):  # the engine reports the error
        return grammar
    kept = enforceable_schema(schema, SchemaReader(grammar.field, grammar.field), check)
    return grammar if kept == schema else Grammar(grammar.kind, json.dumps(kept), grammar.field)


def enforceable_schema(
    schema: Any,  # noqa: ANN401  # as it came
    reader: SchemaReader,
    check: SchemaCheck | None,
    tool: str | None = None,
) -> Any:  # noqa: ANN401
    """Do the same for a schema, read by ``reader``. ``tool``: the tool whose arguments it describes."""
    kept = reader.read(schema)
    if reader.left_out and check is None:
        param = reader.param or min(reader.left_out.values())
        raise InvalidParameter(_refusal(reader.left_out), param=param, code="unsupported_schema_keyword")
    if reader.left_out and check is not None:
        check.add(schema, tool)
    return kept


def _refusal(words: dict[str, str]) -> str:
    named = ", ".join(f"'{word}' (at {words[word]})" for word in sorted(words))
    return (
        f"The schema's {named} cannot be enforced during generation. Remove it, or ask the operator to set"
        " lenient_schemas for this model: the answer is then checked against it after generation."
    )


# --- tools and forced forms -------------------------------------------------------------------------------------------
#
# Tools in the prompt, and the format of answers, from a chat body and the model's dialect.

_UNSUPPORTED: Final = "unsupported_parameter"


def tools_for_template(tokens: ModelTokens, tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    """Return the tools as the chat template expects them. Raises InvalidParameter if it does not support tools."""
    if tools and not tokens.describes_tools:
        text = (
            f"The chat template of {tokens.model} does not support tools, and models.{tokens.model}.tool_parser"
            " does not add tool descriptions to the prompt."
        )
        raise InvalidParameter(text, param="tools", code=_UNSUPPORTED)
    return [tool.for_template() for tool in tools]


def tools_for_prompt(request: ChatCompletionRequest) -> Sequence[ToolDefinition]:
    """Return the tools for the prompt; none if ``tool_choice`` is "none"."""
    return () if request.tool_choice == "none" else request.tools or ()


def template_variables(tokens: ModelTokens, request: ChatCompletionRequest) -> dict[str, Any]:
    """Return the chat template's variables: the client's, and ``reasoning_effort`` if the template reads it.

    Other models ignore ``reasoning_effort``. Raises InvalidParameter if it is set twice.
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
        text = f"The tool-call format of the model {tokens.model} is not known (models.{tokens.model}.tool_parser)."
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
    """Return the form of answers that arrive in parts or as plain text."""
    is_single_call = isinstance(request.tool_choice, NamedTool) or request.parallel_tool_calls is False
    return AnswerForm(PLAIN, (), is_single_call=is_single_call, is_legacy=request.is_legacy)


def must_call(request: ChatCompletionRequest) -> bool:
    """Report whether the answer must be a call."""
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)


def grammar_of(
    form: AnswerForm, request: ChatCompletionRequest, content: Grammar | None, check: SchemaCheck | None
) -> Grammar | None:
    """Return the grammar that constrains the answers; ``content``: the grammar of answers without calls.

    Raises InvalidParameter where calls and other output cannot be distinguished, and for what ``enforceable``
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
        raise InvalidParameter(f"'{field}' is not supported here: {error}.", param=field) from error


# --- sampling ---------------------------------------------------------------------------------------------------------

_SAME_NAME = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "n",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")


def requested_max_tokens(request: GenerationRequest) -> tuple[str, int] | None:
    """Return the field that limits the output, and its value; None if the client set none."""
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return None if request.max_tokens is None else ("max_tokens", request.max_tokens)


def sampling_of(
    request: GenerationRequest,
    max_tokens: int,
    check: SchemaCheck | None = None,
    defaults: Mapping[str, float] = MappingProxyType({}),
    *,
    is_enforced: bool = True,
) -> Sampling:
    """Return the wire form of a request's sampling fields. ``check``: see ``enforceable``; raises as it does.

    ``defaults``: of the model. Without ``is_enforced`` the grammar is omitted.
    """
    given: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    given |= {name: tuple(value) for name in _LISTS if (value := getattr(request, name))}
    if request.top_k is not None and request.top_k > 0:
        given["top_k"] = request.top_k
    return Sampling(
        defaults={name: value for name, value in defaults.items() if getattr(request, name) is None},
        max_tokens=max_tokens,
        logprobs=_logprobs(request),
        grammar=enforceable(request.grammar, check) if is_enforced else None,
        prompt_logprobs=wanted_of_prompt(request),
        **given,
    )


def wanted_of_prompt(request: GenerationRequest) -> int | None:
    """Return the number of logprob candidates requested per prompt token; None: no prompt logprobs."""
    wanted = [request.prompt_logprobs]
    if isinstance(request, CompletionRequest) and request.echo:
        wanted.append(request.logprobs)
    return max((count for count in wanted if count is not None), default=None)


def _logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, ChatCompletionRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    return request.logprobs if isinstance(request, CompletionRequest) else None


# --- for pools that take messages -------------------------------------------------------------------------------------
#
# Chat bodies in jobs for chat pools, and the fields that chat pools do not support.
#
# The pool's worker refuses fields that only some of their APIs support.

_SCHEMA_KINDS: Final = frozenset({"json_schema", "json_object"})


def conversation_of(
    request: ChatCompletionRequest, tokens: ModelTokens, *, max_tokens: int, prompt_tokens: int, is_text: bool
) -> Conversation | None:
    """Build the conversation for chat pools; None if there are none, or they do not support a field of the body.

    ``is_text``: engines' answers are returned as plain text. Raises InvalidParameter for an unsupported field if only
    chat pools serve the model.
    """
    if not tokens.takes_messages:
        return None
    field = _not_honoured(request)
    if field is not None and tokens.counts_chats:
        text = f"The model {tokens.model} is served only by chat APIs, which do not support '{field}'."
        raise InvalidParameter(text, param=field, code="unsupported_parameter")
    if field is not None:
        return None
    is_limited = max_tokens < tokens.context_length - prompt_tokens
    chat = chat_of(request, is_limited=is_limited)
    has_ids = not tokens.counts_chats
    return Conversation(
        packed=encode_chat(chat),
        is_plain=not chat.tools and chat.schema is None,
        has_ids=has_ids,
        encode=encoder_of(tokens) if has_ids and is_text else None,
    )


def encoder_of(tokens: ModelTokens) -> Callable[[str], Awaitable[list[int] | None]]:
    """Return a function that encodes a part of an answer, or returns None if that fails or the gateway is full."""
    return partial(_encoded, tokens)


async def _encoded(tokens: ModelTokens, text: str) -> list[int] | None:
    try:
        return await tokens.encode_text(text, add_special_tokens=False)
    except (Refused, TokenizerError):
        return None


def _not_honoured(request: ChatCompletionRequest) -> str | None:
    """Return the first field that chat APIs cannot support because it needs the model's tokens or template."""
    grammar = request.grammar
    wanted = {
        "logprobs": bool(request.logprobs),
        "prompt_logprobs": request.prompt_logprobs is not None,
        "return_token_ids": bool(request.return_token_ids),
        "truncate_prompt_tokens": request.truncate_prompt_tokens is not None,
        "chat_template_kwargs": bool(request.chat_template_kwargs) and _thinks(request) is None,
        "add_generation_prompt": not (request.adds_generation_prompt or request.continue_final_message),
        "" if grammar is None else grammar.field: grammar is not None and grammar.kind not in _SCHEMA_KINDS,
    }
    return next((name for name, is_wanted in wanted.items() if is_wanted), None)


def chat_of(request: ChatCompletionRequest, *, is_limited: bool) -> Chat:
    """Return the wire form. ``is_limited``: see Chat."""
    choice = request.tool_choice
    tools = tools_for_prompt(request)
    return Chat(
        turns=tuple(message.for_job() for message in request.messages),
        tools=tuple(map(_tool, tools)),
        tool_choice=choice if tools and choice in {"auto", "required"} else None,
        only_tool=choice.function.name if isinstance(choice, NamedTool) else None,
        is_single_call=request.parallel_tool_calls is False,
        schema=_schema(request),
        reasoning_effort=request.reasoning_effort,
        thinks=_thinks(request),
        is_limited=is_limited,
        continues_last=bool(request.continue_final_message),
    )


def _thinks(request: ChatCompletionRequest) -> bool | None:
    """Return the template variable that switches reasoning, if it is the only variable; else None."""
    variables = dict(request.chat_template_kwargs or {})
    thinks = variables.pop(THINKING.rpartition(".")[2], None)
    return thinks if isinstance(thinks, bool) and not variables else None


def _tool(tool: ToolDefinition) -> Tool:
    function = tool.function
    parameters = None if function.parameters is None else json.dumps(function.parameters)
    return Tool(function.name, function.description, parameters, function.strict)


def _schema(request: ChatCompletionRequest) -> AnswerSchema | None:
    grammar = request.grammar
    if grammar is None:
        return None
    if grammar.kind == "json_object":
        return AnswerSchema()
    asked = request.response_format.json_schema if request.response_format is not None else None
    if asked is None:
        return AnswerSchema(grammar.source)
    return AnswerSchema(grammar.source, asked.name, asked.strict)
