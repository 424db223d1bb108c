import json
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.api.answers import chat_answer, completion_answer
from gateway.api.sse import ChatChunks, CompletionChunks, usage_fields
from protocol.messages import TokenLogprob, Tokens

LOGPROBS = (TokenLogprob(5, "é", -0.5, "é".encode(), ((5, "é", -0.5, "é".encode()), (6, "b", -1.5, b"b"))),)


def frame(text: str, index: int = 0, **rest: Any) -> Tokens:
    return Tokens("r", 1, 1, index, (5,), text, **rest)


def events(stream: bytes) -> list[dict[str, Any]]:
    parts = stream.split(b"\n\n")
    assert parts.pop() == b""
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


def chat_chunks(*, with_usage: bool = False, choices: int = 1) -> ChatChunks:
    return ChatChunks("chatcmpl-1", 17, 'm"odel', choices=choices, with_usage=with_usage)


def chunk(choices: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 17, "model": 'm"odel'}
    return {**head, "choices": choices, **rest}


def choice(delta: dict[str, Any], index: int = 0, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def test_chat_chunks_are_exactly_openais() -> None:
    chunks = chat_chunks()
    assert events(chunks.of(frame('"Hi"\n\n'))) == [
        chunk([choice({"role": "assistant", "content": ""})]),
        chunk([choice({"content": '"Hi"\n\n'})]),
    ]
    assert events(chunks.of(frame("x"))) == [chunk([choice({"content": "x"})])]
    assert chunks.of(frame("")) == b""  # held back: nothing to tell
    assert events(chunks.of(frame("end", finish_reason="length"))) == [
        chunk([choice({"content": "end"})]),
        chunk([choice({}, finish_reason="length")]),
    ]


def test_each_choice_has_its_own_role() -> None:
    chunks = chat_chunks(choices=2)
    first, second = events(chunks.of(frame("a", 1))), events(chunks.of(frame("b", 0)))
    assert [event["choices"][0]["index"] for event in first + second] == [1, 1, 0, 0]
    assert "role" in second[0]["choices"][0]["delta"]


def test_usage_is_null_but_at_the_end() -> None:
    chunks = chat_chunks(with_usage=True)
    usage = usage_fields(prompt_tokens=3, cached_tokens=2, completion_tokens=4)
    all_events = events(chunks.of(frame("a", finish_reason="stop")) + chunks.usage(usage, 1))
    assert [event["usage"] for event in all_events[:-1]] == [None] * 3
    assert all_events[-1] == chunk([], usage=usage)
    assert usage["total_tokens"] == 7
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert events(chunks.usage(usage, 3)) == [{**chunk([], usage=usage), "spillway": {"attempts": 3}}]


def test_chat_logprobs() -> None:
    chunks = chat_chunks()
    [_, event] = events(chunks.of(frame("é", logprobs=LOGPROBS)))
    parsed = ChatCompletionChunk.model_validate(event)
    assert parsed.choices[0].logprobs is not None
    [content] = parsed.choices[0].logprobs.content or []
    assert (content.token, content.logprob, content.bytes) == ("é", -0.5, list("é".encode()))
    assert [(top.token, top.logprob) for top in content.top_logprobs] == [("é", -0.5), ("b", -1.5)]


def test_completion_chunks() -> None:
    chunks = CompletionChunks("cmpl-1", 17, "m", choices=1, with_usage=False, echo="say ")
    stream = chunks.of(frame("hi")) + chunks.of(frame("")) + chunks.of(frame("", finish_reason="stop"))
    head = {"id": "cmpl-1", "object": "text_completion", "created": 17, "model": "m"}
    choice = {"index": 0, "logprobs": None}
    assert events(stream) == [
        {**head, "choices": [{**choice, "text": "say hi", "finish_reason": None}]},
        {**head, "choices": [{**choice, "text": "", "finish_reason": "stop"}]},
    ]


def test_completion_logprobs_know_their_offsets() -> None:
    chunks = CompletionChunks("cmpl-1", 17, "m", choices=1, with_usage=False)
    stream = b"".join(chunks.of(frame("é", logprobs=LOGPROBS)) for _ in range(2))
    offsets = [event["choices"][0]["logprobs"]["text_offset"] for event in events(stream)]
    assert offsets == [[0], [1]]
    whole = completion_answer("cmpl-1", 17, "m", [frame("é", logprobs=LOGPROBS)] * 2, choices=1, usage={})
    assert json.loads(whole)["choices"][0]["logprobs"] == {
        "tokens": ["é", "é"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"é": -0.5, "b": -1.5}] * 2,
        "text_offset": [0, 1],
    }


def test_whole_chat_answer() -> None:
    frames = [frame("a", 1), frame("b", logprobs=LOGPROBS, finish_reason="length"), frame("c", 1, finish_reason="stop")]
    body = chat_answer("chatcmpl-1", 17, "m", frames, choices=2, usage=usage_fields(1, 0, 3))
    answer = ChatCompletion.model_validate_json(body)
    assert [c.message.content for c in answer.choices] == ["b", "ac"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[1].logprobs is None
