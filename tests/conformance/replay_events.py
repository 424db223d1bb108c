"""Answers of servers, event by event, as published, around a language model that is a hash.

The next token depends only on the text before it, so that a continuation equals the undisturbed answer. Every token is
an ASCII character with its id in a byte-level vocabulary. If no real server was available, the schema's source is
given.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

CHARACTERS: Final = "etaoinshrdlucmfwypvbgkqjxzTONISHRL"

DONE: Final = "data: [DONE]\n\n"

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """One token of an answer."""

    text: str
    top: Sequence[tuple[int, float]]  # the likeliest ids, this one first
    end: str | None  # "stop" | "length"

    @property
    def id(self) -> int:
        return self.top[0][0]


def id_of(character: str) -> int:
    return 2 + ord(character) - ord("!")  # after two special tokens


def steps(
    prompt: Sequence[int] | str, limit: int, given: Body, logprobs: int | None = None, stop_ids: Sequence[int] = ()
) -> Iterator[Step]:
    """Continue token ids or a text. ``given`` has the temperature, and a seed, if they are sent."""
    ids = [id_of(one) if isinstance(one, str) else one for one in prompt]
    noise = 0.0 if given["temperature"] == 0 else random.Random(given.get("seed")).random()
    for place in range(limit):
        first = hashlib.sha256(repr((tuple(ids[-6:]), len(ids), noise)).encode()).digest()[0]
        likeliest = [CHARACTERS[(first + rank) % len(CHARACTERS)] for rank in range(logprobs or 1)]
        top = [(id_of(one), -0.1 - rank) for rank, one in enumerate(likeliest)]
        ids.append(top[0][0])
        end = "stop" if ids[-1] in stop_ids else "length" if place + 1 == limit else None
        yield Step(likeliest[0], top, end)
        if end:
            return


def completion(choice: Body, **more: Any) -> Body:
    return {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, **choice}], **more}


def llamacpp(body: Body) -> Iterator[Body]:
    logprobs = body.get("n_probs")
    for step in steps(body["prompt"], body["n_predict"], body, logprobs):
        event: dict[str, Any] = {"index": 0, "content": "?", "tokens": [step.id], "stop": False}
        if logprobs:
            candidates = [{"id": id_, "token": "?", "logprob": logprob} for id_, logprob in step.top]
            event["completion_probabilities"] = [{**candidates[0], "top_logprobs": candidates}]
        yield event
    yield {"index": 0, "tokens": [], "stop": True, "stop_type": "limit", "timings": {"cache_n": 0}}


def vllm(body: Body) -> Iterator[Body]:
    logprobs, tokens = body.get("logprobs"), 0
    for step in steps(body["prompt"], body["max_tokens"], body, logprobs, body["stop_token_ids"]):
        top = {f"token_id:{id_}": logprob for id_, logprob in step.top}
        reported = None if logprobs is None else {"token_logprobs": [step.top[0][1]], "top_logprobs": [top]}
        choice = {"text": "", "token_ids": [step.id], "finish_reason": step.end, "logprobs": reported}
        tokens += 1
        yield completion(choice, usage=None)
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens, "prompt_tokens_details": None}
    yield {"id": "cmpl-1", "choices": [], "usage": usage}


def trtllm(body: Body) -> Iterator[Body]:
    """Return CompletionStreamResponse of tensorrt_llm/serve/openai_protocol.py, which forbids unknown fields.

    https://github.com/NVIDIA/TensorRT-LLM
    """
    assert body["detokenize"] is False
    *events, last = vllm({**body, "logprobs": None})
    stops = body["stop_token_ids"]
    for event in events:
        [choice] = event["choices"]
        yield completion({**choice, "stop_reason": next((one for one in choice["token_ids"] if one in stops), None)})
    yield last


def sglang(body: Body) -> Iterator[Body]:
    """https://docs.sglang.ai/basic_usage/native_api.html."""
    given = body["sampling_params"]
    output: list[int] = []
    for step in steps(body["input_ids"], given["max_new_tokens"], given, None, given["stop_token_ids"]):
        output.append(step.id)
        meta = {"completion_tokens": len(output), "finish_reason": step.end and {"type": step.end}}
        yield {"text": "?", "output_ids": list(output), "meta_info": meta}


def lmdeploy(body: Body) -> Iterator[Body]:
    """Return GenerateReqOutput of lmdeploy/serve/openai/protocol.py, as endpoints/generate.py streams it.

    https://github.com/InternLM/lmdeploy
    """
    sampling = {**body, "max_new_tokens": body["max_tokens"]}
    for event in sglang({"input_ids": body["input_ids"], "sampling_params": sampling}):
        meta = {**event["meta_info"], "prompt_tokens": len(body["input_ids"]), "output_token_logprobs": None}
        yield {**event, "output_ids": event["output_ids"][-1:], "meta_info": meta}


def tgi(body: Body) -> Iterator[Body]:
    """Return StreamResponse of docs/openapi.json of https://github.com/huggingface/text-generation-inference."""
    given = body["parameters"]
    heat = {**given, "temperature": float(given["do_sample"])}
    others = [{"id": 40 + rank, "text": "?", "logprob": -1.0 - rank, "special": False} for rank in range(9)]
    text = ""
    for step in steps(body["inputs"], given["max_new_tokens"], heat):
        text += step.text
        token = {"id": step.id, "text": step.text, "logprob": -0.5, "special": False}
        event = {"index": len(text), "token": token, "top_tokens": [token, *others][: given.get("top_n_tokens", 0)]}
        details = {"finish_reason": step.end, "generated_tokens": len(text), "seed": None}
        yield {**event, "generated_text": step.end and text, "details": step.end and details}


def ollama(body: Body) -> Iterator[Body]:
    """Return lines of JSON: https://docs.ollama.com/api/generate."""
    assert body["raw"] is True
    given = body["options"]
    reported = {"model": "replay:latest", "created_at": "2026-11-22T12:00:00Z"}
    for step in steps(body["prompt"], given["num_predict"], given):
        yield {**reported, "response": step.text, "done": False}
    counts = {"prompt_eval_count": 0, "eval_count": 7}  # not reliable
    yield {**reported, "response": "", "done": True, "done_reason": "length", **counts}


def triton(body: Body) -> Iterator[Body]:
    """Follow docs/protocol/extension_generate.md of https://github.com/triton-inference-server/server.

    The request's fields belong to a model whose every parameter is an input, see ``replay``.
    """
    assert body["stream"] is True
    for step in steps(body["text_input"], body["max_tokens"], body):
        yield {"model_name": "replay", "model_version": "1", "text_output": step.text}


def openai_completions(body: Body) -> Iterator[Body]:
    """https://platform.openai.com/docs/api-reference/completions."""
    for step in steps(body["prompt"], body["max_tokens"], body):
        yield completion({"text": step.text, "logprobs": None, "finish_reason": step.end})


KINDS: Final = (vllm, llamacpp, sglang, lmdeploy, trtllm, tgi, ollama, triton, openai_completions)
EVENTS: Final[dict[str, Callable[[Body], Iterator[Body]]]] = {one.__name__: one for one in KINDS}
CLOSED_BY_DONE: Final = {"vllm", "trtllm", "sglang", "lmdeploy", "openai_completions"}


def sse(value: Body) -> str:
    return f"data: {json.dumps(value)}\n\n"


def events_of(kind: str, body: Body) -> list[str]:
    """Return the stream that answers a body in a wire format."""
    framed = [json.dumps(one) + "\n" if kind == "ollama" else sse(one) for one in EVENTS[kind](body)]
    return framed + [DONE] * (kind in CLOSED_BY_DONE)
