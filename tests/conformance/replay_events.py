"""Answers of servers, event by event, as their makers publish them, around two language models that are hashes.

The next token of the one depends on the token ids before it alone, the next character of the other on the text, so that
a continuation equals the undisturbed answer. Where no real server could be asked, the source of a schema is named.
"""

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

FIRST_ID: Final = 40  # what comes before are special tokens and control characters
VOCABULARY: Final = 300
CHARACTERS: Final = "etaoinshrdlucmfwypvbgkqjxz,.;ETAOIN"

Body = Mapping[str, Any]


def likeliest(ids: Sequence[int], count: int, noise: float = 0.0) -> list[tuple[int, float]]:
    """The next tokens, likeliest first."""
    digest = hashlib.sha256(repr((tuple(ids[-6:]), len(ids), noise)).encode()).digest()
    return [(FIRST_ID + digest[place] % (VOCABULARY - FIRST_ID), -0.1 - place) for place in range(max(1, count))]


@dataclass(frozen=True)
class Wanted:
    """A request in token ids, in whatever format."""

    ids: list[int]
    max_tokens: int
    noise: float  # of the seed, where it is sampled
    logprobs: int | None
    stop_ids: frozenset[int]

    def tokens(self) -> list[list[tuple[int, float]]]:
        ids = list(self.ids)
        made: list[list[tuple[int, float]]] = []
        while len(made) < self.max_tokens:
            made.append(likeliest(ids, self.logprobs or 1, self.noise))
            ids.append(made[-1][0][0])
            if ids[-1] in self.stop_ids:
                break
        return made


def characters(text: str, count: int, noise: float = 0.0) -> str:
    """Return what follows a text."""
    whole = text
    for _ in range(count):
        digest = hashlib.sha256(repr((whole[-6:], len(whole), noise)).encode()).digest()
        whole += CHARACTERS[digest[0] % len(CHARACTERS)]
    return whole[len(text) :]


def id_of(character: str) -> int:
    """A byte-level vocabulary's id of a printable character of ASCII, after two special tokens."""
    return 2 + ord(character) - ord("!")


def noise_of(temperature: float, seed: int | None) -> float:
    if temperature == 0:
        return 0.0
    return random.Random(seed).random()


def sse(value: Body) -> str:
    return f"data: {json.dumps(value)}\n\n"


def llamacpp_events(body: Body) -> list[str]:
    wanted = Wanted(
        body["prompt"],
        body["n_predict"],
        noise_of(body["temperature"], body.get("seed")),
        body.get("n_probs"),
        frozenset(),
    )
    events = []
    for top in wanted.tokens():
        event: dict[str, Any] = {"index": 0, "content": "?", "tokens": [top[0][0]], "stop": False}
        if wanted.logprobs:
            candidates = [{"id": id_, "token": "?", "logprob": logprob} for id_, logprob in top]
            event["completion_probabilities"] = [{**candidates[0], "top_logprobs": candidates}]
        events.append(sse(event))
    return [*events, sse({"index": 0, "tokens": [], "stop": True, "stop_type": "limit", "timings": {"cache_n": 0}})]


def vllm_events(body: Body) -> list[str]:
    wanted = Wanted(
        body["prompt"],
        body["max_tokens"],
        noise_of(body["temperature"], body.get("seed")),
        body.get("logprobs"),
        frozenset(body["stop_token_ids"]),
    )
    tokens = wanted.tokens()
    events = []
    for place, top in enumerate(tokens):
        is_stop = top[0][0] in wanted.stop_ids
        reason = "stop" if is_stop else "length" if place + 1 == len(tokens) else None
        choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": [top[0][0]], "finish_reason": reason}
        choice["logprobs"] = None
        if wanted.logprobs is not None:
            told = {f"token_id:{id_}": logprob for id_, logprob in top}
            choice["logprobs"] = {"token_logprobs": [top[0][1]], "top_logprobs": [told]}
        events.append(sse({"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": None}))
    usage = {"prompt_tokens": len(wanted.ids), "completion_tokens": len(tokens), "prompt_tokens_details": None}
    return [*events, sse({"id": "cmpl-1", "choices": [], "usage": usage}), "data: [DONE]\n\n"]


def sglang_events(body: Body) -> list[str]:
    """https://docs.sglang.ai/basic_usage/native_api.html."""
    sampling = body["sampling_params"]
    wanted = Wanted(
        body["input_ids"],
        sampling["max_new_tokens"],
        noise_of(sampling["temperature"], None),
        None,
        frozenset(sampling["stop_token_ids"]),
    )
    tokens = wanted.tokens()
    output: list[int] = []
    events = []
    for place, top in enumerate(tokens):
        output.append(top[0][0])
        is_last = place + 1 == len(tokens)
        kind = "stop" if top[0][0] in wanted.stop_ids else "length"
        meta = {"completion_tokens": len(output), "finish_reason": {"type": kind} if is_last else None}
        events.append(sse({"text": "?", "output_ids": list(output), "meta_info": meta}))
    return [*events, "data: [DONE]\n\n"]


def lmdeploy_events(body: Body) -> list[str]:
    """GenerateReqOutput in lmdeploy/serve/openai/protocol.py, as endpoints/generate.py streams it.

    https://github.com/InternLM/lmdeploy
    """
    stop_ids = frozenset(body["stop_token_ids"])
    wanted = Wanted(body["input_ids"], body["max_tokens"], noise_of(body["temperature"], None), None, stop_ids)
    tokens = wanted.tokens()
    events = []
    for place, top in enumerate(tokens):
        is_last = place + 1 == len(tokens)
        kind = "stop" if top[0][0] in stop_ids else "length"
        meta = {
            "prompt_tokens": len(wanted.ids),
            "completion_tokens": place + 1,
            "finish_reason": {"type": kind} if is_last else None,
            "output_token_logprobs": None,
        }
        events.append(sse({"text": "?", "output_ids": [top[0][0]], "meta_info": meta}))
    return [*events, "data: [DONE]\n\n"]


def trtllm_events(body: Body) -> list[str]:
    """CompletionStreamResponse in tensorrt_llm/serve/openai_protocol.py, which forbids fields it does not know.

    https://github.com/NVIDIA/TensorRT-LLM
    """
    assert body["detokenize"] is False
    stop_ids = frozenset(body["stop_token_ids"])
    noise = noise_of(body["temperature"], body.get("seed"))
    tokens = Wanted(body["prompt"], body["max_tokens"], noise, None, stop_ids).tokens()
    events = []
    for place, top in enumerate(tokens):
        is_stop = top[0][0] in stop_ids
        choice = {
            "index": 0,
            "text": "",
            "token_ids": [top[0][0]],
            "logprobs": None,
            "finish_reason": "stop" if is_stop else "length" if place + 1 == len(tokens) else None,
            "stop_reason": top[0][0] if is_stop else None,
        }
        events.append(sse({"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": None}))
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens)}
    return [*events, sse({"id": "cmpl-1", "choices": [], "usage": usage}), "data: [DONE]\n\n"]


def tgi_events(body: Body) -> list[str]:
    """StreamResponse in docs/openapi.json of https://github.com/huggingface/text-generation-inference."""
    given = body["parameters"]
    text = characters(body["inputs"], given["max_new_tokens"], noise_of(float(given["do_sample"]), given.get("seed")))
    events = []
    for place, character in enumerate(text):
        is_last = place + 1 == len(text)
        tops = [{"id": 40 + rank, "text": "?", "logprob": -1.0 - rank, "special": False} for rank in range(9)]
        token = {"id": id_of(character), "text": character, "logprob": -0.5, "special": False}
        events.append(
            sse(
                {
                    "index": place + 1,
                    "token": token,
                    "top_tokens": [token, *tops][: given.get("top_n_tokens", 0)],
                    "generated_text": text if is_last else None,
                    "details": {"finish_reason": "length", "generated_tokens": len(text), "seed": None}
                    if is_last
                    else None,
                }
            )
        )
    return events


def ollama_events(body: Body) -> list[str]:
    """Lines of JSON: https://docs.ollama.com/api/generate."""
    assert body["raw"] is True
    options = body["options"]
    noise = noise_of(options["temperature"], options.get("seed"))
    text = characters(body["prompt"], options["num_predict"], noise)
    told = {"model": "replay:latest", "created_at": "2026-11-22T12:00:00Z"}
    events = [json.dumps({**told, "response": character, "done": False}) + "\n" for character in text]
    counts = {"prompt_eval_count": 0, "eval_count": 7}  # which are not to be relied on
    return [*events, json.dumps({**told, "response": "", "done": True, "done_reason": "length", **counts}) + "\n"]


def triton_events(body: Body) -> list[str]:
    """docs/protocol/extension_generate.md of https://github.com/triton-inference-server/server.

    The request's fields are those of a model whose every parameter is an input, see ``server_replay``.
    """
    assert body["stream"] is True
    text = characters(body["text_input"], body["max_tokens"], noise_of(body["temperature"], body.get("seed")))
    told = {"model_name": "replay", "model_version": "1"}
    return [sse({**told, "text_output": character}) for character in text]


def openai_completions_events(body: Body) -> list[str]:
    """https://platform.openai.com/docs/api-reference/completions."""
    noise = noise_of(body["temperature"], body.get("seed"))
    text = characters(body["prompt"], body["max_tokens"], noise)
    events = []
    for place, character in enumerate(text):
        reason = "length" if place + 1 == len(text) else None
        choice = {"index": 0, "text": character, "logprobs": None, "finish_reason": reason}
        events.append(sse({"id": "cmpl-1", "object": "text_completion", "choices": [choice]}))
    return [*events, "data: [DONE]\n\n"]


EVENTS: Final[dict[str, Callable[[Body], list[str]]]] = {
    "vllm": vllm_events,
    "llamacpp": llamacpp_events,
    "sglang": sglang_events,
    "lmdeploy": lmdeploy_events,
    "trtllm": trtllm_events,
    "tgi": tgi_events,
    "ollama": ollama_events,
    "triton": triton_events,
    "openai_completions": openai_completions_events,
}
