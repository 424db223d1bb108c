"""vLLM's OpenAI-compatible server: ``POST /v1/completions`` with a prompt of ids and ``return_token_ids``.

Documentation: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pool_worker.engines.formats.base import SAMPLING, Delta, Medium, Scored, ServerFacts, ServerRequest, ids
from pool_worker.engines.formats.openai_completions import cached_of, choice_of, ended_by, model_of
from pool_worker.engines.framing import Framing, MalformedEvent

_ID_PREFIX: Final = "token_id:"


class VllmFormat:
    """vLLM's ``/v1/completions`` as a WireFormat."""

    asked_in: Medium = "ids"
    answers_in: Medium = "ids"
    keeps_blanks = True
    health_path = "/health"
    facts_path = "/v1/models"
    generate_path = "/v1/completions"
    framing: Framing = "server-sent events"
    honoured = SAMPLING | {"seed", "min_tokens", "logprobs", "allowed_token_ids", "bad_words"}
    grammars = frozenset({"json_schema", "json_object", "regex"})
    takes_cache_salt = True

    @staticmethod
    def facts(answer: Mapping[str, Any], model: str | None) -> ServerFacts:
        """Find the requested model, or the first."""
        return model_of(answer, model)

    @staticmethod
    def body(ask: ServerRequest) -> dict[str, Any]:
        """Build the body of a streaming request."""
        body = {
            "model": ask.facts.model,
            "prompt": list(ask.token_ids),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **sampling(ask),
        }
        if ask.cache_salt:
            body["cache_salt"] = ask.cache_salt
        if ask.params.logprobs is not None:
            body["return_tokens_as_token_ids"] = True
        return body

    @staticmethod
    def read(event: Mapping[str, Any], seen_tokens: int) -> Delta:
        """Read one event. The last event has the usage and no choice."""
        del seen_tokens
        choice = choice_of(event)
        if choice is None:
            return Delta(cached_tokens=cached_of(event))
        token_ids = ids(choice.get("token_ids") or [], "token_ids")
        scored = choice.get("logprobs")
        return Delta(token_ids, scored=None if scored is None else _scored(scored), ended_by=ended_by(choice))


def sampling(ask: ServerRequest) -> dict[str, Any]:
    """Return the parameters by the names that vLLM's API shares with its ``SamplingParams``."""
    params = ask.params
    fields: dict[str, Any] = {
        "max_tokens": ask.max_tokens,
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
        "logit_bias": dict(params.logit_bias),
    }
    if ask.seed is not None:
        fields["seed"] = ask.seed
    if params.logprobs is not None:
        fields["logprobs"] = params.logprobs
    if params.allowed_token_ids:
        fields["allowed_token_ids"] = list(params.allowed_token_ids)
    if params.bad_words:
        fields["bad_words"] = list(params.bad_words)
    if params.grammar is not None:
        fields["structured_outputs"] = _structured(params.grammar.kind, params.grammar.source)
    return fields


def _structured(kind: str, source: str) -> dict[str, Any]:
    if kind == "json_object":
        return {"json_object": True}
    return {"json": msgspec.json.decode(source)} if kind == "json_schema" else {"regex": source}


def _scored(logprobs: object) -> list[Scored]:
    try:
        reported = msgspec.convert(logprobs, _Logprobs)
        tops = reported.top_logprobs or [None] * len(reported.token_logprobs)
        return [
            Scored(logprob, sorted(((_id(key), value) for key, value in (top or {}).items()), key=lambda one: -one[1]))
            for logprob, top in zip(reported.token_logprobs, tops, strict=True)
        ]
    except (msgspec.ValidationError, ValueError) as error:
        raise MalformedEvent(f"logprobs: {error}") from error


def _id(key: str) -> int:
    [token_id] = ids([int(key.removeprefix(_ID_PREFIX))], "top_logprobs")
    return token_id


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float] | None] | None = None
