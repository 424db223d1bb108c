"""llama.cpp's own server: ``POST /completion`` with token ids in and out.

Documentation: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final

import msgspec

from pool_worker.engines.formats.base import (
    SAMPLING,
    Delta,
    Medium,
    Scored,
    ServerFacts,
    ServerRequest,
    count,
    ids,
    limit,
    only_model,
    text,
)
from pool_worker.engines.framing import Framing, MalformedEvent
from pool_worker.engines.reported_ends import end_of_tokens
from protocol.job import TokenId

DIGEST_CHARS: Final = 12
_ENDS: Final = {"eos": "eos", "limit": "length", "word": "stop"}


class LlamaCppFormat:
    """llama.cpp's ``/completion`` as a WireFormat."""

    asked_in: Medium = "ids"
    answers_in: Medium = "ids"
    keeps_blanks = True
    health_path = "/health"
    facts_path = "/props"
    generate_path = "/completion"
    framing: Framing = "server-sent events"
    honoured = SAMPLING | {"seed", "logprobs"}
    grammars = frozenset({"json_schema", "json_object"})
    takes_cache_salt = False

    @staticmethod
    def facts(answer: Mapping[str, Any], model: str | None) -> ServerFacts:
        """Read the facts of the server's only model, whose context is divided among its slots."""
        settings = answer.get("default_generation_settings")
        context = limit(settings.get("n_ctx")) if isinstance(settings, dict) else None
        slots = limit(answer.get("total_slots"))
        if context is None or slots is None:
            raise MalformedEvent("/props has no n_ctx and total_slots")
        template, path = answer.get("chat_template"), answer.get("model_path")
        return ServerFacts(
            only_model(model, answer.get("model_alias"), path) or "default",
            context,
            slots,
            weights=text(path),
            template=sha256(template.encode()).hexdigest()[:DIGEST_CHARS] if isinstance(template, str) else None,
        )

    @staticmethod
    def body(ask: ServerRequest) -> dict[str, Any]:
        """Build the body of a streaming request. Switches off the server's defaults (top_k 40, min_p 0.05, …)."""
        params = ask.params
        body: dict[str, Any] = {
            "prompt": list(ask.token_ids),
            "n_predict": ask.max_tokens,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": True,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repeat_penalty": params.repetition_penalty,
            "repeat_last_n": len(ask.token_ids) + ask.max_tokens,  # penalties apply to the whole text
            "logit_bias": [[token_id, bias] for token_id, bias in params.logit_bias.items()],
            "ignore_eos": params.ignore_eos,
        }
        if ask.seed is not None:
            body["seed"] = ask.seed % 2**32
        if params.logprobs is not None:
            body["n_probs"] = max(1, params.logprobs)
        if params.grammar is not None:
            source = params.grammar.source
            body["json_schema"] = msgspec.json.decode(source) if source else {"type": "object"}
        return body

    @staticmethod
    def read(event: Mapping[str, Any], seen_tokens: int) -> Delta:
        del seen_tokens
        if event.get("stop") is True:
            ended_by = _ENDS.get(str(event.get("stop_type"))) or end_of_tokens(event.get("stop_type"))
            timings = event.get("timings")
            cached = count(timings.get("cache_n")) if isinstance(timings, dict) else None
            return Delta(ended_by=ended_by, cached_tokens=cached or 0)
        token_ids = ids(event.get("tokens"), "tokens")
        scored = event.get("completion_probabilities")
        return Delta(token_ids, scored=None if scored is None else _scored(scored))


def _scored(probabilities: object) -> list[Scored]:
    try:
        entries = msgspec.convert(probabilities, list[_Entry])
    except msgspec.ValidationError as error:
        raise MalformedEvent(f"completion_probabilities: {error}") from error
    return [Scored(entry.logprob, [(one.id, one.logprob) for one in entry.top_logprobs]) for entry in entries]


class _Candidate(msgspec.Struct):
    id: TokenId
    logprob: float


class _Entry(_Candidate):
    top_logprobs: list[_Candidate] = []
