"""Choices of a request that pools that take messages may answer, and which pools can continue them."""

from typing import Any

import pytest
from msgspec.structs import replace

from gateway.dispatch.choices import ChatChoices
from gateway.request.request import Conversation
from protocol.errors import ErrorCode
from protocol.job import Accepted, ChatUsage, Deltas, Failed, Part, Tokens, unpack_token_ids

ACCEPTED = Accepted("r", 1, 0, "w", "p", "aws", "eu", 1.0, counted_by="provider")
TEXT = (Part("text", "Hello"),)
CALL = (Part("call", "weather", "c1"), Part("arguments", '{"ci'))
PROVIDER = ChatUsage("provider", 11, 7, 2)


async def encode(text: str) -> list[int]:
    return [ord(char) for char in text]


def choices(n: int = 1, *, max_tokens: int = 100, **fields: Any) -> ChatChoices:
    conversation = Conversation(b"chat", **{"is_plain": True, "has_ids": True, "encode": encode, **fields})
    made = ChatChoices(n, max_tokens, conversation)
    made.generated_by(ACCEPTED)
    return made


def deltas(*parts: Part, index: int = 0, attempt: int = 1, tokens: int = 2, **end: Any) -> Deltas:
    return Deltas("r", attempt, 1, index, parts, tokens, **end)


def refused(code: str = ErrorCode.INVALID_REQUEST, *, retryable: bool = False) -> Failed:
    return Failed("r", 1, 1, code, "no", retryable=retryable)


async def test_text_continues_as_a_message_or_from_its_ids() -> None:
    held = choices()
    assert held.add_deltas(deltas(*TEXT)) is None
    assert (held.takes_messages, held.takes_ids, held.can_resume) == (True, False, True)
    await held.prepare()
    assert held.takes_ids
    [point] = held.resume_points()
    assert unpack_token_ids(point.token_ids) == await encode("Hello")
    assert (point.text, point.text_chars, point.is_encoded, point.tokens) == ("Hello", 5, True, 2)


async def test_output_of_engines_and_apis_is_one_text() -> None:
    held = choices()
    held.add(Tokens("r", 1, 1, 0, (1, 2), "Say: "))
    [point] = held.resume_points()
    assert (point.text, point.is_encoded, unpack_token_ids(point.token_ids)) == ("Say: ", False, [1, 2])
    held.add_deltas(deltas(*TEXT, attempt=2))
    await held.prepare()
    [point] = held.resume_points()
    assert (point.text, point.is_encoded, point.tokens) == ("Say: Hello", True, 4)
    assert unpack_token_ids(point.token_ids) == await encode("Say: Hello")
    assert held.held_tokens() == held.longest_tokens() == 4


@pytest.mark.parametrize("part", [CALL, (Part("reasoning", "Hm."),), (Part("refusal", "No."),)])
async def test_an_answer_that_is_not_plain_text_cannot_continue(part: tuple[Part, ...]) -> None:
    held = choices()
    held.add_deltas(deltas(*TEXT, *part))
    await held.prepare()
    assert (held.takes_messages, held.takes_ids, held.can_resume) == (False, False, False)


async def test_a_partial_answer_to_a_schema_cannot_continue() -> None:
    held = choices(is_plain=False)
    assert held.takes_messages, "there is no output yet"
    held.add_deltas(deltas(*TEXT))
    await held.prepare()
    assert (held.takes_messages, held.takes_ids, held.can_resume) == (False, False, False)


async def test_token_ids_are_not_encoded_without_an_encoder() -> None:
    held = choices(has_ids=False, encode=None)
    held.add_deltas(deltas(*TEXT))
    await held.prepare()
    assert (held.takes_messages, held.takes_ids, held.can_resume) == (True, False, True)
    reasoning_model = choices(encode=None)
    reasoning_model.add(Tokens("r", 1, 1, 0, (1,), "<think>"))
    assert (reasoning_model.takes_messages, reasoning_model.takes_ids, reasoning_model.can_resume) == (
        False,
        True,
        True,
    )


async def test_an_engine_cannot_tell_that_an_apis_choice_is_complete() -> None:
    held = choices(2)
    held.add_deltas(deltas(*TEXT, finish_reason="stop", usage=PROVIDER))
    held.add_deltas(deltas(*TEXT, index=1))
    await held.prepare()
    assert (held.takes_messages, held.takes_ids) == (True, False)


def test_the_source_of_counts() -> None:
    held = choices(2)
    assert held.counted_by == "engine"
    held.add_deltas(deltas(*TEXT, tokens=90))
    assert (held.counted_by, held.held_tokens()) == ("estimate", 90)
    held.add_deltas(deltas(finish_reason="stop", usage=PROVIDER, tokens=0))
    assert (held.counted_by, held.usage) == ("estimate", None)
    held.add_deltas(deltas(*TEXT, index=1, finish_reason="stop", usage=PROVIDER))
    assert held.are_complete()
    assert (held.counted_by, held.usage) == ("provider", ChatUsage("provider", 22, 14, 4))
    assert held.held_tokens() == 14, "they take the place of the estimates"


def test_output_of_two_attempts_is_estimated() -> None:
    held = choices()
    held.add_deltas(deltas(*TEXT, tokens=3))
    held.add_deltas(deltas(*TEXT, attempt=2, finish_reason="stop", usage=PROVIDER))
    assert (held.counted_by, held.usage, held.held_tokens()) == ("estimate", None, 10)


@pytest.mark.parametrize("usage", [ChatUsage("provider", 1, 10_000_000), ChatUsage("provider", 1, -1)])
def test_implausible_counts_are_ignored(usage: ChatUsage) -> None:
    held = choices()
    assert held.add_deltas(deltas(*TEXT, finish_reason="stop", usage=usage)) is None
    assert (held.counted_by, held.held_tokens(), held.are_complete()) == ("estimate", 2, True)


def test_parts_that_were_not_requested_are_refused() -> None:
    held = choices()
    assert held.add_deltas(deltas(*TEXT, index=5)) is not None
    assert held.add_deltas(deltas(*TEXT, tokens=-1)) is not None
    assert held.add_deltas(deltas(*TEXT, tokens=100_000)) is not None
    held.add_deltas(deltas(*TEXT, finish_reason="stop"))
    assert held.add_deltas(deltas(*TEXT)) is not None


def test_another_pool_may_accept_what_an_api_refused() -> None:
    held = choices()
    assert not held.is_final(refused())
    assert (held.packed_chat, held.takes_messages, held.takes_ids) == (None, False, True)
    only_apis = choices(has_ids=False, encode=None)
    assert only_apis.is_final(refused(retryable=True)), "it would be refused again"
    assert not only_apis.is_final(refused(ErrorCode.ENGINE_ERROR, retryable=True))
    engine = choices()
    engine.generated_by(replace(ACCEPTED, counted_by="engine"))
    assert engine.is_final(refused())


def test_dropped_output_is_not_counted() -> None:
    held = choices()
    held.add_deltas(deltas(*CALL))
    held.clear()
    assert (held.has_output, held.held_tokens(), held.can_resume, held.counted_by) == (False, 0, True, "engine")
