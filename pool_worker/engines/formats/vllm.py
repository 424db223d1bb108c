"""vLLM's OpenAI-compatible server: ``POST /v1/completions`` with a prompt of ids and ``return_token_ids``.

Its documentation: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pool_worker.engines.formats.base import SAMPLING, Ask, Delta, Scored, ServerFacts, ids
from pool_worker.engines.framing import Framing, MalformedEvent, ServerFailure

_ID_PREFIX: Final = "token_id:"


class VllmFormat:
    """See the module."""

    health_path = "/health"
    facts_path = "/v1/models"
    generate_path = "/v1/completions"
    framing: Framing = "server-sent events"
    honoured = SAMPLING | {"seed", "min_tokens", "logprobs", "allowed_token_ids", "bad_words"}
    grammars = frozenset({"json_schema", "json_object", "regex"})

    @staticmethod
    def facts(answer: Mapping[str, Any], model: str | None) -> ServerFacts:
        """See WireFormat: the model asked for, or the first."""
        models = answer.get("data")
        entries = [one for one in models if isinstance(one, dict)] if isinstance(models, list) else []
        chosen = next((one for one in entries if model is None or one.get("id") == model), None)
        if chosen is None:
            names = ", ".join(str(one.get("id")) for one in entries) or "none"
            raise MalformedEvent(f"the server does not serve {model!r}; it serves: {names}")
        length = chosen.get("max_model_len")
        return ServerFacts(str(chosen["id"]), length if isinstance(length, int) else None)

    @staticmethod
    def body(ask: Ask) -> dict[str, Any]:
        """See WireFormat."""
        params = ask.params
        body: dict[str, Any] = {
            "model": ask.model,
            "prompt": list(ask.token_ids),
            "max_tokens": ask.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "detokenize": False,
            "skip_special_tokens": False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
            "min_tokens": ask.min_tokens,
            "ignore_eos": params.ignore_eos,
            "stop_token_ids": list(params.stop_token_ids),
            "logit_bias": {str(token_id): bias for token_id, bias in params.logit_bias.items()},
        }
        if ask.seed is not None:
            body["seed"] = ask.seed
        if params.logprobs is not None:
            body |= {"logprobs": params.logprobs, "return_tokens_as_token_ids": True}
        if params.allowed_token_ids:
            body["allowed_token_ids"] = list(params.allowed_token_ids)
        if params.bad_words:
            body["bad_words"] = list(params.bad_words)
        if params.grammar is not None:
            body["structured_outputs"] = _structured(params.grammar.kind, params.grammar.source)
        return body

    @staticmethod
    def read(event: Mapping[str, Any], seen_tokens: int) -> Delta:
        """See WireFormat. The last event has the usage and no choice."""
        del seen_tokens
        if "error" in event:
            raise ServerFailure(str(event["error"]))
        choices = event.get("choices")
        if not isinstance(choices, list):
            raise MalformedEvent("an event without choices")
        if not choices:
            return Delta(cached_tokens=_cached(event.get("usage")))
        choice = choices[0]
        if not isinstance(choice, dict):
            raise MalformedEvent("a choice that is no object")
        token_ids = ids(choice.get("token_ids") or [], "token_ids")
        scored = choice.get("logprobs")
        reason = choice.get("finish_reason")
        if reason not in {None, "stop", "length"}:
            raise ServerFailure(f"the server ended the choice with {reason!r}")
        return Delta(token_ids, None if scored is None else _scored(scored), reason)


def _structured(kind: str, source: str) -> dict[str, Any]:
    if kind == "json_object":
        return {"json_object": True}
    return {"json": msgspec.json.decode(source)} if kind == "json_schema" else {"regex": source}


def _cached(usage: object) -> int:
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else 0


def _scored(logprobs: object) -> list[Scored]:
    try:
        told = msgspec.convert(logprobs, _Logprobs)
        tops = told.top_logprobs or [None] * len(told.token_logprobs)
        return [
            Scored(logprob, sorted(((_id(key), value) for key, value in (top or {}).items()), key=lambda one: -one[1]))
            for logprob, top in zip(told.token_logprobs, tops, strict=True)
        ]
    except (msgspec.ValidationError, ValueError) as error:
        raise MalformedEvent(f"logprobs: {error}") from error


def _id(key: str) -> int:
    return int(key.removeprefix(_ID_PREFIX))


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float] | None] | None = None
