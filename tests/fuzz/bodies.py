"""JSON bodies of all APIs, up to what goes into a job: the chat, its sampling, the conversation for hosted pools."""

import json
from collections.abc import Callable
from typing import Any

import msgspec

from gateway.api.anthropic_messages import Messages, counted_chat
from gateway.api.fields import parse_body
from gateway.api.openai_responses import Responses, previous_of
from gateway.api.sampling import chat_of, sampling_of
from gateway.api.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    parse_chat,
    parse_completion,
    parse_tokenize,
)
from gateway.api.vectors import parse_embedding, parse_rerank, parse_score
from gateway.errors import Refused
from protocol.job import Sampling, decode_chat, encode_chat
from tests.fuzz.mutations import Form

FORM: Form = "json"
MAX_TOKENS = 5

_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
_CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
SEEDS = [
    json.dumps(body).encode()
    for body in (
        {**_CHAT, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["a"], "seed": 7, "logit_bias": {"5": 1.5}},
        {**_CHAT, "tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}, "stream": True,
         "stream_options": {"include_usage": True}, "metadata": {"a": "b"}, "user": "u"},
        {**_CHAT, "messages": [{"role": "system", "content": [{"type": "text", "text": "x"}]}, *_CHAT["messages"],
         {"role": "assistant", "content": None, "tool_calls": [_CALL]}, {"role": "tool", "tool_call_id": "c",
         "content": "r"}]},
        {**_CHAT, "response_format": {"type": "json_schema", "json_schema":
         {"name": "n", "schema": {"type": "object"}}},
         "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 4, "chat_template_kwargs": {"a": [1]}},
        {**_CHAT, "functions": [_TOOL["function"]], "function_call": "auto", "guided_regex": "a+",
         "reasoning_effort": "low"},
        {"model": "m", "prompt": ["a", "b"], "max_tokens": 3, "echo": True, "logprobs": 1, "bad_words": ["x"]},
        {"model": "m", "prompt": [[1, 2], [3]], "allowed_token_ids": [1], "stop_token_ids": [2], "min_tokens": 1},
        {"model": "m", "input": ["a"], "encoding_format": "base64", "dimensions": 4},
        {"model": "m", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
        {"model": "m", "text_1": "a", "text_2": ["b"]},
        {"model": "m", "tokens": [1, 2, 3]},
        {"model": "m", "input": "hello", "instructions": "i", "store": True, "previous_response_id": "resp_1",
         "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}, "reasoning": {"effort": "low"}},
        {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]},
         {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
         {"type": "function_call_output", "call_id": "c", "output": "r"},
         {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}],
         "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}], "metadata": {"a": "b"}},
        {"model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "messages": [
         {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
         {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
          {"type": "thinking", "thinking": "t", "signature": "s"}]},
         {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]}],
         "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}},
    )
]  # fmt: skip
PARSERS: list[Callable[[bytes], Any]] = [
    parse_tokenize,
    parse_embedding,
    parse_score,
    parse_rerank,
    lambda body: parse_body(DetokenizeRequest, body),
    previous_of,
]
TRANSLATED: list[Callable[[bytes], Any]] = [
    lambda body: Responses().translate(body).chat,
    lambda body: Messages().translate(body).chat,
    counted_chat,
]


def run(payload: bytes) -> None:
    for parse in PARSERS:
        try:
            parsed = parse(payload)
        except Refused:
            continue
        msgspec.json.encode(parsed if parsed is None or isinstance(parsed, str) else parsed.model_dump())
    for translate in TRANSLATED:
        try:
            chat = translate(payload)
        except Refused:
            continue
        _parse(parse_chat, msgspec.json.encode(chat))
    _parse(parse_chat, payload)
    _parse(parse_completion, payload)


def _parse(parse: Callable[[bytes], ChatCompletionRequest | CompletionRequest], body: bytes) -> None:
    """Parse a body and make of it what a job carries."""
    try:
        request = parse(body)
        sampling = sampling_of(request, MAX_TOKENS)
    except Refused:
        return
    encoded = msgspec.msgpack.encode(sampling)
    assert msgspec.msgpack.decode(encoded, type=Sampling) == sampling
    if isinstance(request, ChatCompletionRequest):
        msgspec.json.encode([message.for_template() for message in request.messages])
        chat = chat_of(request, is_limited=True)
        assert decode_chat(encode_chat(chat)) == chat
