"""Inference servers as pools: an answer that one begins goes on at one of another make, from the very tokens it has."""

from dataclasses import dataclass

import openai
import pytest
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tests.acceptance.system import System
from tests.conformance.replay import Replay
from tests.conformance.replay_events import events_of

MODEL = "served"
PROMPT = "hello world, price 5"
MAX_TOKENS = 60
CUT_AFTER = 7


@dataclass
class Served:
    system: System
    vllm: Replay
    llamacpp: Replay

    def stream(self) -> str:
        with openai.OpenAI(base_url=f"{self.system.base_url}/v1", api_key=self.system.api_key, max_retries=0) as client:
            chunks = client.completions.create(
                model=MODEL,
                prompt=PROMPT,
                max_tokens=MAX_TOKENS,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


@pytest.fixture
def served(system: System, vllm: Replay, llamacpp: Replay) -> Served:
    return Served(system, vllm, llamacpp)


def test_a_cut_stream_goes_on_at_a_server_of_another_make(served: Served) -> None:
    whole = served.stream()
    assert len(whole) >= MAX_TOKENS / 2
    prompt = served.vllm.bodies[-1]["prompt"]

    def cut(request: Request) -> Response:
        return StreamingResponse(iter(events_of("vllm", request._json)[:CUT_AFTER]), media_type="text/event-stream")

    served.vllm.faults.append(cut)
    before = len(served.llamacpp.bodies)
    assert served.stream() == whole
    [body] = served.llamacpp.bodies[before:]
    assert body["prompt"][: len(prompt)] == prompt
    assert len(body["prompt"]) == len(prompt) + CUT_AFTER
    assert body["n_predict"] == MAX_TOKENS - CUT_AFTER


def test_a_server_whose_key_is_wrong_fails_nobody(served: Served) -> None:
    whole = served.stream()
    served.vllm.faults.append(lambda _: JSONResponse({"error": "invalid key"}, 401))
    assert served.stream() == whole


def test_what_the_server_refuses_is_the_clients_own_error(served: Served) -> None:
    served.vllm.faults.append(lambda _: JSONResponse({"error": {"message": "no such luck"}}, 400))
    with pytest.raises(openai.BadRequestError, match="no such luck"):
        served.stream()


def test_both_makes_give_the_same_tokens() -> None:
    """Check what the tests above rest on."""
    shared = {"temperature": 0}
    vllm = events_of("vllm", {**shared, "prompt": [60, 61], "max_tokens": 3, "stop_token_ids": []})
    llamacpp = events_of("llamacpp", {**shared, "prompt": [60, 61], "n_predict": 3})
    assert [line.split('"token_ids": ')[1].split("]")[0] for line in vllm[:3]] == [
        line.split('"tokens": ')[1].split("]")[0] for line in llamacpp[:3]
    ]
