"""A chat body as a job carries it to pools that take messages, and which bodies these cannot honour at all.

What only some of their APIs take, the pool's worker knows, and refuses by name.
"""

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from gateway.api.form import tools_for_prompt
from gateway.api.schema import ChatCompletionRequest
from gateway.api.tool_fields import NamedTool, ToolDefinition
from gateway.errors import ApiError, InvalidParameter
from gateway.request.request import Conversation
from gateway.tokenizing.encoders import TokenizerError
from gateway.tokenizing.model_tokens import ModelTokens
from protocol.job import THINKING, AnswerSchema, Chat, Tool, encode_chat

_SCHEMA_KINDS: Final = frozenset({"json_schema", "json_object"})


def conversation_of(
    request: ChatCompletionRequest, tokens: ModelTokens, *, max_tokens: int, prompt_tokens: int, is_text: bool
) -> Conversation | None:
    """Build the conversation for pools that take messages; None where there are none, or they cannot honour the body.

    ``is_text``: what engines make of its answer is what is told of it. Raises InvalidParameter where only such pools
    serve the model.
    """
    if not tokens.takes_messages:
        return None
    field = _not_honoured(request)
    if field is not None and tokens.counts_chats:
        text = f"The model {tokens.model} is served by APIs that take messages, which do not support '{field}'."
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
    """Return what encodes a part of an answer; it gives None where that is impossible or the gateway is full."""
    return partial(_encoded, tokens)


async def _encoded(tokens: ModelTokens, text: str) -> list[int] | None:
    try:
        return await tokens.encode_text(text, add_special_tokens=False)
    except (ApiError, TokenizerError):
        return None


def _not_honoured(request: ChatCompletionRequest) -> str | None:
    """The first field that no API which takes messages can honour: what needs the model's own tokens or template."""
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
    """The wire form. ``is_limited``: see Chat."""
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
    """Return whether the model is asked to reason, if that is all that is said to its template."""
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
