"""Checks a request before it enters the engine, so that nothing a client sends can fail inside a step."""

import math
from collections.abc import Iterable

from engine.errors import RequestRejected
from engine.types import EngineInfo, GenerationRequest
from protocol.generation import SamplingParams

_MAX_CHOICES = 128  # OpenAI's limit for n


def check_request(request: GenerationRequest, info: EngineInfo) -> None:
    """Raise RequestRejected, naming the field, for a request that can never be served."""
    if request.adapter is not None and request.adapter not in (adapter.name for adapter in info.adapters):
        raise RequestRejected("model", f"{request.adapter!r} is not an adapter of this engine")
    _check_sampling(request.sampling, info)
    _check_token_ids("prompt_ids", request.prompt_ids, info)
    if not request.prompt_ids:
        raise RequestRejected("prompt_ids", "the prompt is empty")
    _check_resume(request, info)
    total = len(request.prompt_ids) + request.sampling.max_tokens
    if total > info.max_model_len:
        raise RequestRejected(
            "max_tokens",
            f"{len(request.prompt_ids)} prompt tokens and {request.sampling.max_tokens} output tokens exceed "
            f"the model's {info.max_model_len}",
        )
    if total > info.kv_tokens:
        raise RequestRejected("max_tokens", f"{total} tokens exceed the KV pool's {info.kv_tokens}")


def _check_sampling(params: SamplingParams, info: EngineInfo) -> None:
    rules = {
        "temperature": 0 <= params.temperature < math.inf,
        "top_p": 0 <= params.top_p <= 1,
        "top_k": params.top_k >= 0,
        "min_p": 0 <= params.min_p <= 1,
        "presence_penalty": math.isfinite(params.presence_penalty),
        "frequency_penalty": math.isfinite(params.frequency_penalty),
        "repetition_penalty": 0 < params.repetition_penalty < math.inf,
        "logit_bias": all(map(math.isfinite, params.logit_bias.values())),
        "n": 1 <= params.n <= _MAX_CHOICES,
        "stop": all(params.stop),
        "bad_words": all(map(str.strip, params.bad_words)),
        "max_tokens": params.max_tokens >= 0,
        "min_tokens": 0 <= params.min_tokens <= params.max_tokens,
        "logprobs": params.logprobs is None or 0 <= params.logprobs <= info.vocab_size,
        "prompt_logprobs": params.prompt_logprobs is None or 0 <= params.prompt_logprobs <= info.vocab_size,
    }
    for field, is_met in rules.items():
        if not is_met:
            raise RequestRejected(field, f"{getattr(params, field)!r} is out of range")
    _check_token_ids("logit_bias", params.logit_bias, info)
    _check_token_ids("stop_token_ids", params.stop_token_ids, info)
    _check_token_ids("allowed_token_ids", params.allowed_token_ids, info)


def _check_resume(request: GenerationRequest, info: EngineInfo) -> None:
    indexes = [point.index for point in request.resume]
    if len(set(indexes)) < len(indexes) or not all(0 <= index < request.sampling.n for index in indexes):
        raise RequestRejected("resume", f"indexes {indexes} are not distinct choices of {request.sampling.n}")
    if not 0 <= request.scored_tokens <= len(request.prompt_ids):
        raise RequestRejected("scored_tokens", f"{request.scored_tokens} is out of range")
    for point in request.resume:
        _check_token_ids("resume", point.token_ids, info)
        if len(point.token_ids) > request.sampling.max_tokens:
            raise RequestRejected("resume", f"choice {point.index} already has more than max_tokens tokens")


def _check_token_ids(field: str, token_ids: Iterable[int], info: EngineInfo) -> None:
    wrong = next((token_id for token_id in token_ids if not 0 <= token_id < info.vocab_size), None)
    if wrong is not None:
        raise RequestRejected(field, f"token id {wrong} is not in the vocabulary of {info.vocab_size}")
