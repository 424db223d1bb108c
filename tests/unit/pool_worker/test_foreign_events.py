"""Events that violate an API's documentation: a named server fault, or an ignored number. Never a crash."""

from collections.abc import Mapping
from typing import Any

import pytest

from engine.text.detokenizer import TokenText
from engine.types import GenerationRequest
from pool_worker.engines.chat_formats import chat_format
from pool_worker.engines.chat_formats.base import AnswerReader, ChatServerRequest
from pool_worker.engines.formats import FORMATS
from pool_worker.engines.framing import MalformedEvent, ServerFailure
from pool_worker.engines.server_choice import ServerChoice
from pool_worker.engines.tokenizer_folder import TokenizerFolder
from pool_worker.settings import AnthropicSettings, OpenAIChatSettings, VertexSettings
from protocol.generation import SamplingParams
from protocol.job import Chat, Finished, StepFrame, Turn, decode_step, encode
from spillway.config import DEMO_MODEL_PATH

TOKENIZER = TokenizerFolder(DEMO_MODEL_PATH)
PARAMS = SamplingParams(max_tokens=4, logprobs=1)
HUGE = 2**70


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "", **fields}]}


def usage_of_completions(cached: object) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}}


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("vllm", choice(token_ids=[HUGE])),
        ("vllm", choice(token_ids=[2**33])),
        ("vllm", choice(finish_reason=[])),
        ("vllm", choice(finish_reason={})),
        (
            "vllm",
            choice(token_ids=[1], logprobs={"token_logprobs": [-1.0], "top_logprobs": [{f"token_id:{HUGE}": -1.0}]}),
        ),
        ("openai_completions", choice(finish_reason=[])),
        ("trtllm", choice(token_ids=[HUGE])),
        ("llamacpp", {"tokens": [HUGE]}),
        ("llamacpp", {"tokens": [1], "completion_probabilities": [{"id": HUGE, "logprob": -1.0, "top_logprobs": []}]}),
        ("lmdeploy", {"meta_info": {}, "output_ids": [HUGE]}),
        ("sglang", {"meta_info": {"finish_reason": {"type": []}}, "output_ids": []}),
        ("sglang", {"meta_info": {}, "output_ids": [HUGE]}),
        ("tgi", {"token": {"id": -1}}),
        ("tgi", {"token": {"id": HUGE}}),
        ("triton", {"text_output": "", "finish_reason": []}),
    ],
)
def test_an_invalid_event_of_a_token_server_is_its_fault(kind: str, event: Mapping[str, Any]) -> None:
    with pytest.raises((MalformedEvent, ServerFailure)):
        FORMATS[kind].read(event, 0)


@pytest.mark.parametrize("count", [HUGE, 2**64 - 1, -1, True, "1", 1.5, None, []])
@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("vllm", usage_of_completions),
        ("trtllm", usage_of_completions),
        ("openai_completions", usage_of_completions),
        ("sglang", lambda count: {"meta_info": {"cached_tokens": count}, "output_ids": []}),
        ("llamacpp", lambda count: {"stop": True, "stop_type": "eos", "timings": {"cache_n": count}}),
    ],
)
def test_implausible_cached_tokens_are_ignored(kind: str, event: Any, count: object) -> None:
    delta = FORMATS[kind].read(event(count), 0)
    taken = ServerChoice(GenerationRequest("r", (1,), PARAMS), 0, TokenText(TOKENIZER), frozenset())
    output = taken.take(delta) or taken.end("stop")
    finished = Finished("r", 1, 0, False, 1, output.cached_tokens, 0, 1.0)
    assert decode_step(encode(StepFrame(1, "w", (finished,)))).frames[0] == finished
    assert output.cached_tokens == 0


@pytest.mark.parametrize("number", [HUGE, -1, 0, True, "1"])
def test_an_implausible_length_is_ignored(number: object) -> None:
    answer = {"data": [{"id": "m", "max_model_len": number}]}
    assert FORMATS["vllm"].facts(answer, None).max_model_len is None


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("vllm", {"data": [{}]}),
        ("openai_completions", {"data": [{"object": "model"}]}),
        ("llamacpp", {"default_generation_settings": {"n_ctx": HUGE}, "total_slots": 1}),
    ],
)
def test_a_page_without_a_model_is_refused(kind: str, answer: Mapping[str, Any]) -> None:
    with pytest.raises(MalformedEvent):
        FORMATS[kind].facts(answer, None)


def reader_of(kind: str) -> AnswerReader:
    settings: Any = {
        "openai": lambda: OpenAIChatSettings(kind="openai_chat", url="http://localhost", model="m", profile="openai"),
        "anthropic": lambda: AnthropicSettings(kind="anthropic", model="m"),
        "vertex": lambda: VertexSettings.model_validate(
            {"kind": "vertex", "model": "m", "project": "p", "location": "global"}
        ),
    }[kind]()
    return chat_format(settings).reader(ChatServerRequest("m", Chat((Turn("user", "a"),)), PARAMS, 4, None))


def chunk_with(content: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}}]}


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "thinking", "thinking": 5}],
        [{"type": "thinking", "thinking": [{"text": 5}]}],
        [{"type": "text", "text": 5}],
        [{"type": ["text"]}],
    ],
)
def test_a_message_part_that_is_not_text_is_the_servers_fault(content: object) -> None:
    with pytest.raises(MalformedEvent):
        reader_of("openai").read(chunk_with(content))


@pytest.mark.parametrize("details", [5, "a", [], [1], True, {"cached_tokens": HUGE}, {"reasoning_tokens": -1}])
def test_implausible_usage_details_are_ignored(details: object) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    reported = {**usage, "prompt_tokens_details": details, "completion_tokens_details": details}
    reader = reader_of("openai")
    assert reader.read({"choices": [], "usage": reported}) == reader.read({"choices": [], "usage": usage})


@pytest.mark.parametrize("count", [HUGE, 2**63, True, -1])
@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("openai", lambda count: {"choices": [], "usage": {"prompt_tokens": count, "completion_tokens": 1}}),
        (
            "anthropic",
            lambda count: {"type": "message_delta", "delta": {}, "usage": {"input_tokens": count, "output_tokens": 1}},
        ),
        ("vertex", lambda count: {"usageMetadata": {"promptTokenCount": count}}),
    ],
)
def test_an_implausible_usage_is_ignored(kind: str, event: Any, count: object) -> None:
    assert reader_of(kind).read(event(count)).usage is None


def test_arguments_with_large_numbers_are_kept() -> None:
    part = {"functionCall": {"name": "f", "args": {"a": HUGE}}}
    delta = reader_of("vertex").read({"candidates": [{"content": {"parts": [part]}}]})
    assert delta.parts[1].text == f'{{"a":{HUGE}}}'
