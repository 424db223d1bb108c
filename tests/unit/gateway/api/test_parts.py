"""Answers in parts: streamed, whole, and as stored payloads."""

from typing import Any

import msgspec
import pytest

from gateway.api.answers import ChoiceContent, chat_answer, choice_object, gather
from gateway.api.events import ParsedChatChunks
from gateway.payloads import RecordedAnswer, RecordedChunks
from protocol.dialects.dialect import PLAIN, AnswerForm
from protocol.job import ChatUsage, Deltas, Part, Tokens

THOUGHT = Part("reasoning", "Hm.")
CALLS = (
    Part("call", "weather", "c1"),
    Part("arguments", '{"city":'),
    Part("arguments", '"Rome"}'),
    Part("call", "time"),
    Part("arguments", "{}"),
)
USAGE = ChatUsage("provider", 9, 8, 0, 3)


def frame(*parts: Part, reason: str | None = None, usage: ChatUsage | None = None) -> Deltas:
    return Deltas("r", 1, 1, 0, parts, 1, reason, usage)


def form(**fields: Any) -> AnswerForm:
    return AnswerForm(PLAIN, (), **fields)


def streamed(
    frames: list[Deltas | Tokens], of: AnswerForm
) -> tuple[list[dict[str, Any]], RecordedAnswer, dict[str, Any]]:
    """Return the choices of all events, their payload, and the usage."""
    answer = RecordedAnswer(1, 1000)
    made = ParsedChatChunks("a", 1, "m", form=of, choices=1, with_usage=True)
    chunks = RecordedChunks(made, answer)
    events = b"".join(chunks.of(one) for one in frames).split(b"\n\n")[:-1]
    usage = msgspec.json.decode(chunks.usage({}, 1).removeprefix(b"data: "))["usage"]
    return [msgspec.json.decode(event.removeprefix(b"data: "))["choices"][0] for event in events], answer, usage


class ChoiceEncoder:
    def __init__(self, of: AnswerForm) -> None:
        self._form = of

    def choice(self, text: str, finish_reason: str, parts: Any = ()) -> dict[str, Any]:
        return choice_object(ChoiceContent(text, finish_reason, parts), self._form.parser())


async def test_reasoning_and_calls() -> None:
    frames: list[Deltas | Tokens] = [frame(THOUGHT), frame(*CALLS), frame(reason="stop", usage=USAGE)]
    choices, answer, usage = streamed(frames, form())
    first, *_, last = choices
    assert first["delta"] == {"role": "assistant", "content": None}
    assert choices[1]["delta"]["reasoning_content"] == "Hm."
    assert last["finish_reason"] == "tool_calls"
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3}
    ids = [call["id"] for one in choices for call in one["delta"].get("tool_calls", ()) if "id" in call]
    assert ids[0] == "c1"
    assert ids[1], "an API that names no call has one made for it"
    whole = await whole_of(frames, form())
    message = whole["choices"][0]["message"]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"city":"Rome"}', "{}"]
    assert (message["content"], message["reasoning_content"]) == (None, "Hm.")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    [kept] = answer.choices(ChoiceEncoder(form()))
    assert kept["finish_reason"] == "tool_calls"
    assert [call["id"] for call in kept["message"]["tool_calls"]] == ids


async def whole_of(frames: list[Deltas | Tokens], of: AnswerForm) -> dict[str, Any]:
    answer = chat_answer("a", 1, "m", await gather(frames, 1), usage={}, form=of)
    whole: dict[str, Any] = msgspec.json.decode(answer.body)
    return whole


@pytest.mark.parametrize("is_legacy", [False, True])
async def test_parallel_calls_are_dropped_if_disabled(is_legacy: bool) -> None:
    """Not every API has this option."""
    wanted = form(is_single_call=True, is_legacy=is_legacy)
    frames: list[Deltas | Tokens] = [frame(*CALLS[:3]), frame(*CALLS[3:]), frame(reason="stop")]
    choices, _, _ = streamed(frames, wanted)
    name = "function_call" if is_legacy else "tool_calls"
    deltas = [one["delta"][name] for one in choices if name in one["delta"]]
    told = deltas if is_legacy else [call["function"] for [call] in deltas]
    assert "".join(call["arguments"] for call in told) == '{"city":"Rome"}'
    message = (await whole_of(frames, wanted))["choices"][0]["message"]
    calls = [message["function_call"]] if is_legacy else [call["function"] for call in message["tool_calls"]]
    assert calls == [{"name": "weather", "arguments": '{"city":"Rome"}'}]


async def test_engine_text_and_api_parts_form_one_answer() -> None:
    tokens = Tokens("r", 1, 1, 0, (1,), "Hello")
    frames: list[Deltas | Tokens] = [tokens, frame(Part("text", " world")), frame(reason="stop")]
    choices, answer, _ = streamed(frames, form())
    assert "".join(one["delta"].get("content") or "" for one in choices) == "Hello world"
    assert sum("role" in one["delta"] for one in choices) == 1
    assert (await whole_of(frames, form()))["choices"][0]["message"]["content"] == "Hello world"
    [kept] = answer.choices(ChoiceEncoder(form()))
    assert (kept["message"]["content"], kept["finish_reason"]) == ("Hello world", "stop")


async def test_refusals_and_filters() -> None:
    frames: list[Deltas | Tokens] = [frame(Part("refusal", "No.")), frame(reason="content_filter")]
    choices, _, _ = streamed(frames, form())
    assert choices[1]["delta"] == {"refusal": "No."}
    assert choices[-1]["finish_reason"] == "content_filter"
    message = (await whole_of(frames, form()))["choices"][0]["message"]
    assert (message["content"], message["refusal"]) == (None, "No.")
