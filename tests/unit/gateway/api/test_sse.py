import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.api.answers import CompleteAnswer, chat_answer, completion_answer, completion_rows, gather
from gateway.api.events import ChatChunks, CompletionChunks, usage_fields, with_token_ids
from gateway.api.logprobs import DEFAULT_OPTIONS, AnswerOptions
from gateway.request.mailbox import AnyTokens, Mailbox
from protocol.generation import PromptLogprob, TokenLogprob
from protocol.job import Tokens

LOGPROBS = (TokenLogprob(5, "é", -0.5, "é".encode(), ((5, "é", -0.5, "é".encode()), (6, "b", -1.5, b"b"))),)


def frame(text: str, index: int = 0, **rest: Any) -> Tokens:
    return Tokens("r", 1, 1, index, (5,), text, **rest)


def whole_completion(
    frames: list[Tokens], *, usage: dict[str, Any] | None = None, options: AnswerOptions = DEFAULT_OPTIONS
) -> bytes:
    async def make() -> bytes:
        rows = completion_rows(await gather(frames, 1), options)
        return await written(completion_answer("cmpl-1", 17, "m", [rows], usage=usage or {}, options=options))

    return asyncio.run(make())


def whole_chat(
    frames: Sequence[AnyTokens],
    *,
    choices: int = 1,
    usage: dict[str, Any] | None = None,
    options: AnswerOptions = DEFAULT_OPTIONS,
) -> bytes:
    async def make() -> bytes:
        gathered = await gather(frames, choices)
        return await written(chat_answer("c", 17, "m", gathered, usage=usage or {}, options=options))

    return asyncio.run(make())


async def written(answer: CompleteAnswer) -> bytes:
    body = b"".join([piece async for piece in answer.pieces()])
    assert len(json.loads(answer.body)["choices"]) == len(answer.contents)  # it is valid JSON without log-probabilities
    return body


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
    assert chunks.of(frame("")) == b""  # held back: no text
    assert events(chunks.of(frame("end", finish_reason="length"))) == [
        chunk([choice({"content": "end"})]),
        chunk([choice({}, finish_reason="length")]),
    ]


def test_each_choice_has_its_own_role() -> None:
    chunks = chat_chunks(choices=2)
    first, second = events(chunks.of(frame("a", 1))), events(chunks.of(frame("b", 0)))
    assert [event["choices"][0]["index"] for event in first + second] == [1, 1, 0, 0]
    assert "role" in second[0]["choices"][0]["delta"]


def test_usage_is_null_until_the_end() -> None:
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
    chunks = CompletionChunks("cmpl-1", 17, "m", choices=1, with_usage=False, options=AnswerOptions(echo="say "))
    stream = chunks.of(frame("hi")) + chunks.of(frame("")) + chunks.of(frame("", finish_reason="stop"))
    head = {"id": "cmpl-1", "object": "text_completion", "created": 17, "model": "m"}
    choice = {"index": 0, "logprobs": None}
    assert events(stream) == [
        {**head, "choices": [{**choice, "text": "say hi", "finish_reason": None}]},
        {**head, "choices": [{**choice, "text": "", "finish_reason": "stop"}]},
    ]


def test_completion_logprobs_have_text_offsets() -> None:
    chunks = CompletionChunks("cmpl-1", 17, "m", choices=1, with_usage=False)
    stream = b"".join(chunks.of(frame("é", logprobs=LOGPROBS)) for _ in range(2))
    offsets = [event["choices"][0]["logprobs"]["text_offset"] for event in events(stream)]
    assert offsets == [[0], [1]]
    whole = whole_completion([frame("é", logprobs=LOGPROBS)] * 2)
    assert json.loads(whole)["choices"][0]["logprobs"] == {
        "tokens": ["é", "é"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"é": -0.5, "b": -1.5}] * 2,
        "text_offset": [0, 1],
    }


def test_whole_chat_answer() -> None:
    frames = [frame("a", 1), frame("b", logprobs=LOGPROBS, finish_reason="length"), frame("c", 1, finish_reason="stop")]
    body = whole_chat(frames, choices=2, usage=usage_fields(1, 0, 3))
    answer = ChatCompletion.model_validate_json(body)
    assert [c.message.content for c in answer.choices] == ["b", "ac"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[1].logprobs is None


def test_log_probabilities_are_equal_decoded_or_as_bytes() -> None:
    """In pieces of many tokens, for every choice."""
    frames = [
        frame(str(number), number % 2, logprobs=(TokenLogprob(number, str(number), -float(number), b"x"),))
        for number in range(100)
    ]
    mailbox = Mailbox()
    for one in frames:
        mailbox.put_tokens(one)
    held = list(mailbox.tokens())
    assert not any(isinstance(one, Tokens) for one in held)
    assert whole_chat(held, choices=2) == whole_chat(frames, choices=2)
    chat = json.loads(whole_chat(held, choices=2))
    told = [[entry["logprob"] for entry in choice["logprobs"]["content"]] for choice in chat["choices"]]
    assert told == [[-float(number) for number in range(100) if number % 2 == index] for index in range(2)]


# --- what is told beside the text -------------------------------------------------------------------------------------

PROMPT = (
    PromptLogprob(7, "Say"),
    PromptLogprob(8, " x", -2.5, 4, ((9, " y", -0.5), (3, " z", float("-inf")))),
    PromptLogprob(9, " y", -0.25, 1, ((9, " y", -0.25), (8, " x", -2.0))),
)
ECHO = AnswerOptions(echo="Say x y", echo_logprobs=1, prompt_tokens=3)
ECHOED: dict[str, list[Any]] = {
    "tokens": ["Say", " x", " y"],
    "token_logprobs": [None, -2.5, -0.25],
    "top_logprobs": [None, {" y": -0.5, " x": -2.5}, {" y": -0.25}],
    "text_offset": [0, 3, 5],
}


def of_prompt(*tokens: PromptLogprob) -> Tokens:
    return Tokens("r", 1, 1, 0, (), "", prompt_logprobs=tokens)


def test_prompt_logprobs_are_vllms() -> None:
    frames = [of_prompt(*PROMPT[:2]), of_prompt(*PROMPT[2:]), frame("hi", finish_reason="stop")]
    told = [
        None,
        {
            "8": {"logprob": -2.5, "rank": 4, "decoded_token": " x"},
            "9": {"logprob": -0.5, "rank": 1, "decoded_token": " y"},
            "3": {"logprob": -9999.0, "rank": 2, "decoded_token": " z"},
        },
        {
            "9": {"logprob": -0.25, "rank": 1, "decoded_token": " y"},
            "8": {"logprob": -2.0, "rank": 2, "decoded_token": " x"},
        },
    ]
    options = AnswerOptions(prompt_logprobs=2)
    assert json.loads(whole_chat(frames, options=options))["prompt_logprobs"] == told
    whole = json.loads(whole_completion(frames, options=options))
    assert whole["choices"][0]["prompt_logprobs"] == told
    assert whole["choices"][0]["text"] == "hi"
    assert whole["choices"][0]["logprobs"] is None


def test_an_echo_starts_with_the_prompts_logprobs() -> None:
    frames = [of_prompt(*PROMPT), frame("é", logprobs=LOGPROBS), frame("é", logprobs=LOGPROBS, finish_reason="length")]
    body = whole_completion(frames, usage=usage_fields(3, 0, 2), options=ECHO)
    [choice] = json.loads(body)["choices"]
    assert choice["text"] == "Say x yéé"
    assert choice["logprobs"] == {
        "tokens": [*ECHOED["tokens"], "é", "é"],
        "token_logprobs": [*ECHOED["token_logprobs"], -0.5, -0.5],
        "top_logprobs": [*ECHOED["top_logprobs"], *[{"é": -0.5, "b": -1.5}] * 2],
        "text_offset": [0, 3, 5, 7, 8],
    }


def test_scoring_alone() -> None:
    frames = [of_prompt(*PROMPT), Tokens("r", 1, 2, 0, (), "", "length")]
    body = json.loads(whole_completion(frames, options=ECHO))
    [choice] = body["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("Say x y", ECHOED, "length")


def test_a_streamed_echo_precedes_every_choice() -> None:
    chunks = CompletionChunks("cmpl-1", 17, "m", choices=2, with_usage=False, options=ECHO)
    assert chunks.of(of_prompt(*PROMPT[:2])) == b""
    assert chunks.of(frame("early", 1, logprobs=LOGPROBS)) == b"", "choice 1 was faster than the prompt's logprobs"
    stream = events(chunks.of(of_prompt(*PROMPT[2:])) + chunks.of(frame("é", logprobs=LOGPROBS)))
    choices = [event["choices"][0] for event in stream]
    assert [(choice["index"], choice["text"]) for choice in choices] == [
        (0, "Say x y"),
        (1, "Say x y"),
        (1, "early"),
        (0, "é"),
    ]
    assert choices[0]["logprobs"] == choices[1]["logprobs"] == ECHOED
    assert [choice["logprobs"]["text_offset"] for choice in choices[2:]] == [[7], [7]]


def test_tokens_named_by_their_ids() -> None:
    options = AnswerOptions(tokens_as_ids=True)
    chunks = ChatChunks("c", 17, "m", choices=1, with_usage=False, options=options)
    [_, event] = events(chunks.of(frame("é", logprobs=LOGPROBS)))
    [entry] = event["choices"][0]["logprobs"]["content"]
    assert (entry["token"], [top["token"] for top in entry["top_logprobs"]]) == (
        "token_id:5",
        ["token_id:5", "token_id:6"],
    )
    whole = whole_completion([frame("é", logprobs=LOGPROBS)], options=options)
    lists = json.loads(whole)["choices"][0]["logprobs"]
    assert (lists["tokens"], lists["top_logprobs"]) == (["token_id:5"], [{"token_id:5": -0.5, "token_id:6": -1.5}])


@pytest.mark.parametrize("in_choice", [False, True])
def test_token_ids_in_a_stream(in_choice: bool) -> None:
    inner = chat_chunks(choices=2)
    options = AnswerOptions(prompt_ids=[1, 2])
    chunks = with_token_ids(inner, options, choices=2, prompt_in_choice=in_choice)
    stream = b"".join(chunks.of(frame(text, index)) for index, text in ((0, "a"), (1, "b"), (0, ""), (0, "c")))
    stream += chunks.of(frame("d", finish_reason="stop"))
    told: dict[int, list[int]] = {0: [], 1: []}
    prompts = 0
    for event in events(stream):
        [choice] = event["choices"]
        told[choice["index"]] += choice.get("token_ids", [])
        holder = choice if in_choice else event
        prompts += holder.get("prompt_token_ids") == [1, 2]
    assert told == {0: [5] * 4, 1: [5]}
    assert prompts == 2, "once per choice"
    assert with_token_ids(inner, AnswerOptions(), choices=2, prompt_in_choice=in_choice) is inner


def test_token_ids_in_whole_answers() -> None:
    options = AnswerOptions(prompt_ids=[1, 2])
    frames = [frame("a"), frame("b", finish_reason="stop")]
    chat = json.loads(whole_chat(frames, options=options))
    assert (chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == ([1, 2], [5, 5])
    plain = json.loads(whole_completion(frames, options=options))["choices"][0]
    assert (plain["prompt_token_ids"], plain["token_ids"]) == ([1, 2], [5, 5])


def test_the_service_tier_is_returned_if_requested() -> None:
    options = AnswerOptions(service_tier="flex")
    chunks = ChatChunks("c", 17, "m", choices=1, with_usage=False, options=options)
    assert {event["service_tier"] for event in events(chunks.of(frame("a")))} == {"flex"}
    whole = ChatCompletion.model_validate_json(
        whole_chat([frame("a", finish_reason="stop")], usage=usage_fields(1, 0, 1), options=options)
    )
    assert whole.service_tier == "flex"
