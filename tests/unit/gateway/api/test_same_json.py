"""pydantic, which parses bodies, and msgspec, which parses everything else, agree on valid JSON.

A body that only one of them accepts would fail later: in a background response, a line of a batch, or
a stored conversation. Bodies are texts here, because Python values cannot express the differences.
"""

import json
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.api.anthropic_messages import MessagesRequest
from gateway.api.fields import parse_body
from gateway.api.openai_responses import ResponsesRequest
from gateway.api.sampling import sampling_of
from gateway.api.schema import ChatCompletionRequest, CompletionRequest, parse_chat, parse_completion, parse_tokenize
from gateway.api.vectors import parse_embedding, parse_rerank, parse_score
from gateway.batches.anthropic_routes import ENDPOINT, _Requests
from gateway.batches.lines import Wrong, check_line, decode_line
from gateway.errors import Refused
from gateway.settings import BatchSettings
from protocol.job import Sampling

CHAT = "/v1/chat/completions"
MODELS = {"m": "m"}
HEAD = b'{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"a"}],"x":'
PARSERS: list[Callable[[bytes], Any]] = [
    parse_chat,
    parse_completion,
    parse_tokenize,
    parse_embedding,
    parse_score,
    parse_rerank,
    lambda body: parse_body(ResponsesRequest, body),
    lambda body: parse_body(MessagesRequest, body),
]


ATOMS = [
    "null", "true", "0", "-0", "1", "-1", "2.5", "1e2", "1E+2", "0.1e-400", "1e308", "1e400", "-1e400",
    "NaN", "Infinity",
    "-Infinity", "01", "1.", ".5", "+1", "9007199254740993", "9223372036854775808", "18446744073709551616",
    "-9223372036854775809", "9" * 40, "9" * 4301, '""', '"a"', r'"\u0000"', '"\0"', '"\t"', r'"\ud800"',
    r'"\udc00\ud800"',
    r'"\ud83d\ude00"', '"\u20ac"', r'"\x"', "[]", "{}", "[1,]", '{"a":1,}', '{"a":1,"a":"b"}', "'a'", "nul",
    *(opened * depth + "1" + closed * depth for depth in (99, 195, 197, 198, 199, 200, 201, 1100)
      for opened, closed in (("[", "]"), ('{"a":', "}"))),
]  # fmt: skip
KEYS = ["a", "", "model", r"\u0061", r"\u0000", r"\ud800", "x y"]
FIELDS = [
    "x", "metadata", "temperature", "seed", "max_tokens", "logit_bias", "stop", "n", "messages", "prompt", "input",
    "tools", "chat_template_kwargs", "response_format", "user", "documents", "query", "text_1",
    "text_2", "top_k", "stream_options",
    "truncate_prompt_tokens", "stop_token_ids", "allowed_token_ids", "min_tokens", "dimensions", "system", "store",
]  # fmt: skip


def _lists(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    items = st.lists(st.tuples(st.sampled_from(KEYS), inner), max_size=3)
    objects = items.map(lambda pairs: "{" + ",".join(f'"{key}":{value}' for key, value in pairs) + "}")
    return objects | st.lists(inner, max_size=3).map(lambda values: "[" + ", ".join(values) + "]")


VALUES = st.recursive(st.sampled_from(ATOMS), _lists, max_leaves=6)
REQUIRED = {
    "model": '"m"',
    "messages": '[{"role":"user","content":"hello"}]',
    "prompt": '"hello"',
    "input": '"hello"',
    "query": '"a"',
    "documents": '["a"]',
    "text_1": '"a"',
    "text_2": '"a"',
    "max_tokens": "5",
}


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Return bodies that every API accepts except for a few fields; some fields are duplicated."""
    fields = list(REQUIRED.items())
    for name in draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3)):
        fields.insert(draw(st.integers(0, len(fields))), (name, draw(VALUES)))
    if draw(st.booleans()):
        inner = f'[{{"role":"user","content":"hello","x":{draw(VALUES)}}}]'
        fields = [(name, inner if name == "messages" and value == REQUIRED[name] else value) for name, value in fields]
    text = "{" + ",".join(f'"{name}":{value}' for name, value in fields) + "}"
    return text.encode()


def assert_none(request: object, refusal: Exception) -> None:
    assert request is None, refusal


def deep(levels: int) -> bytes:
    """Return a body with this nesting depth, including itself."""
    return HEAD + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@given(bodies())
@example(b"\xef\xbb\xbf{}")
@example(b'{"model":"m","messages":[{"role":"user","content":"a"}],"x":"\xff"}')
@example(deep(200))
@example(deep(201))
@example(deep(1100))
def test_msgspec_accepts_what_pydantic_accepts(body: bytes) -> None:
    for parse in PARSERS:
        try:
            request = parse(body)
        except Refused:
            continue
        given_fields = request.model_dump()
        assert msgspec.json.decode(msgspec.json.encode(given_fields)) == json.loads(request.model_dump_json())
        assert request.model_extra is None or msgspec.json.decode(body).keys() >= request.model_extra.keys()
        if isinstance(request, (ChatCompletionRequest, CompletionRequest)):
            try:
                sampling = sampling_of(request, 5)
            except Refused:
                continue
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=Sampling) == sampling


@given(bodies())
@example(deep(199))
@example(deep(200))
@example(deep(201))
@example(b'{"model":"x","model":"m","messages":[{"role":"user","content":"a"}]}')
def test_a_body_is_equally_valid_alone_and_as_a_line(body: bytes) -> None:
    line = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":' + body + b"}"
    try:
        request = parse_chat(body)
    except Refused:
        request = None
    try:
        check_line(line, CHAT, MODELS)
    except Wrong as wrong:
        if wrong.param != "body.model":  # the endpoint also reports an unknown model
            assert_none(request, wrong)
        return
    # The line passes its body to the API unchanged.
    as_line = bytes(decode_line(line).body)
    try:
        assert parse_chat(as_line) == request
    except Refused:
        assert request is None


@given(bodies())
@example(deep(200))
@example(deep(201))
@example(deep(202))
def test_a_body_is_equally_valid_alone_and_in_a_batch(body: bytes) -> None:
    try:
        parse_body(MessagesRequest, body)
        is_valid = True
    except Refused:
        is_valid = False
    requests = _Requests(BatchSettings())
    try:
        [line] = requests.feed(b'{"requests":[{"custom_id":"a","params":' + body + b"}]}", is_last=True)
        check_line(line, ENDPOINT, MODELS, any_model=True)
    except (Refused, Wrong) as refusal:
        assert_none(is_valid or None, refusal)
