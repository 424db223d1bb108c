"""Faults specific to servers that take text: cuts within characters, spaces, special tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import StreamingResponse

from engine.text.detokenizer import TokenText
from engine.types import GenerationRequest, ResumePoint
from pool_worker.engines.formats.base import ServerFacts, ServerRequest
from pool_worker.engines.formats.triton import TritonFormat
from pool_worker.engines.framing import ServerFailure
from pool_worker.engines.tokenizer_folder import TokenizerFolder
from protocol.generation import SamplingParams
from tests.conformance.driven_engine import Answer, Driver, driving, request
from tests.conformance.replay import ReplayOf
from tests.conformance.replay_events import sse
from tests.conformance.test_engines import server_settings
from tests.unit.pool_worker.test_text_tokens import sentence_pieces


def ollama_says(*texts: str) -> Callable[[Any], StreamingResponse]:
    lines = [json.dumps({"response": text, "done": False}) + "\n" for text in texts]
    end = json.dumps({"response": "", "done": True, "done_reason": "stop"})
    return lambda _: StreamingResponse(iter([*lines, end]))


def halves(tokenizer: str, character: str) -> tuple[int, int]:
    """Return the two tokens of a character of two bytes."""
    tokens = TokenText(TokenizerFolder(Path(tokenizer)))
    of_byte = {tokens.bytes_of(id_): id_ for id_ in range(258)}
    first, second = character.encode()
    return of_byte[bytes([first])], of_byte[bytes([second])]


async def resumed(driver: Driver, *ids: int, chars: int = 0) -> Answer:
    return await driver.answer(request(ignore_eos=False, resume=(ResumePoint(0, ids, chars),)))


async def test_a_split_character_is_requested_again(tokenizer: str, replay_of: ReplayOf) -> None:
    replay = replay_of("ollama")
    first, second = halves(tokenizer, "ß")
    async with driving(server_settings(replay, tokenizer)) as driver:
        replay.faults.append(ollama_says("", "ß", "x"))
        answer = await resumed(driver, 60, first, chars=1)
    assert (answer.text, answer.token_ids[0]) == ("ßx", second)
    assert replay.bodies[-1]["prompt"] == "".join(map(chr, range(71, 91))) + chr(60 + 31)  # without the half


async def test_a_different_character_is_left_to_other_pools(tokenizer: str, replay_of: ReplayOf) -> None:
    replay = replay_of("ollama")
    async with driving(server_settings(replay, tokenizer)) as driver:
        replay.faults.append(ollama_says("y"))
        answer = await resumed(driver, halves(tokenizer, "ß")[0])
        assert (answer.finish_reason, answer.token_ids) == ("error", [])
        assert not driver.refusals


async def test_a_server_with_ids_cannot_finish_a_character(tokenizer: str, replay_of: ReplayOf) -> None:
    async with driving(server_settings(replay_of("tgi"), tokenizer)) as driver:
        answer = await resumed(driver, halves(tokenizer, "ß")[0])
    assert "cut inside a character" in (answer.error or "")


async def test_a_space_that_may_be_lost_is_left_to_other_pools(tmp_path: Path, replay_of: ReplayOf) -> None:
    """A server that strips its text would join two words where it resumes."""
    sentence_pieces().save(str(tmp_path / "tokenizer.json"))
    prompt = tuple(TokenizerFolder(tmp_path).encode("hello", add_special_tokens=False))
    begun = GenerationRequest("r", prompt, SamplingParams(max_tokens=9), (ResumePoint(0, prompt[:2], 1),))
    for kind, more, reason in (
        ("openai_completions", {}, "error"),
        ("openai_completions", {"continues": True}, "length"),
        ("ollama", {}, "length"),
    ):
        settings = server_settings(replay_of(kind), str(tmp_path), **more)
        async with driving(settings) as driver:
            assert (await driver.answer(begun)).finish_reason == reason


async def test_words_of_a_prompt_do_not_become_special_tokens(tokenizer: str, replay_of: ReplayOf) -> None:
    replay = replay_of("openai_completions")
    spelled = tuple(2 + ord(character) - ord("!") for character in "</s>")
    async with driving(server_settings(replay, tokenizer)) as driver:
        await driver.answer(request("spelled", prompt=(60, *spelled), ignore_eos=False))
        assert driver.refusals["spelled"].param == "prompt_ids"
        assert (await driver.answer(request("meant", prompt=(60, 1)))).finish_reason == "length"
        assert replay.bodies[-1]["prompt"].endswith("</s>")


async def test_an_answer_separated_from_its_thinking_is_refused(tokenizer: str, replay_of: ReplayOf) -> None:
    """Ollama may cut a model's thinking out of its text, at an unknown place."""
    replay = replay_of("ollama")
    line = json.dumps({"response": "", "thinking": "hm", "done": False}) + "\n"
    async with driving(server_settings(replay, tokenizer)) as driver:
        replay.faults.append(lambda _: StreamingResponse(iter([line])))
        assert (await driver.answer(request())).finish_reason == "error"


async def test_a_servers_counts_are_ignored(tokenizer: str, replay_of: ReplayOf) -> None:
    """One event may have many tokens, and usage may be missing or nonsense."""
    replay = replay_of("openai_completions")
    events: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "text": "hello world, ", "finish_reason": None}], "usage": "nonsense"}
    ]
    events += [{"choices": [], "usage": {"prompt_tokens": -5}}]
    events += [{"choices": [{"index": 0, "text": "café", "finish_reason": "stop"}]}]
    async with driving(server_settings(replay, tokenizer)) as driver:
        replay.faults.append(lambda _: StreamingResponse(iter(map(sse, events))))
        answer = await driver.answer(request())
    assert (answer.text, answer.finish_reason) == ("hello world, café", "stop")


def triton_ask(*inputs: str) -> dict[str, Any]:
    reported = {"name": "m", "inputs": [{"name": name} for name in inputs], "outputs": [{"name": "text_output"}]}
    facts: ServerFacts = TritonFormat.facts(reported, "m")
    return TritonFormat.body(ServerRequest(facts, [1], "hello", SamplingParams(temperature=0.5), 9, 0, 7, 99))


def test_triton_gets_its_models_inputs() -> None:
    by_vllm = triton_ask("text_input", "stream", "sampling_parameters", "return_finish_reason")
    given = json.loads(by_vllm.pop("sampling_parameters"))
    assert by_vllm == {"text_input": "hello", "stream": True, "return_finish_reason": True}
    assert (given["max_tokens"], given["temperature"], given["seed"], given["ignore_eos"]) == (9, 0.5, 7, False)
    own = triton_ask("text_input", "max_tokens", "random_seed", "temperature")
    assert own == {"text_input": "hello", "max_tokens": 9, "random_seed": 7, "temperature": 0.5}


def test_tritons_ends() -> None:
    assert TritonFormat.read({"text_output": "x", "finish_reason": "None"}, 1).ended_by is None
    assert TritonFormat.read({"text_output": "x", "finish_reason": "length"}, 1).ended_by == "length"
    with pytest.raises(ServerFailure, match="abort"):
        TritonFormat.read({"text_output": "x", "finish_reason": "abort"}, 1)
