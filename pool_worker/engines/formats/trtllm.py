"""TensorRT-LLM's ``trtllm-serve``: ``POST /v1/completions`` with a prompt of ids, answered in ids without detokenizing.

Written from its schema: tensorrt_llm/serve/openai_protocol.py (CompletionRequest, which forbids unknown
fields; CompletionResponseStreamChoice.token_ids) and postprocess_handlers.py (ids if ``detokenize`` is false) of
https://github.com/NVIDIA/TensorRT-LLM
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from pool_worker.engines.formats.base import SAMPLING, Delta, Medium, ServerFacts, ServerRequest, ids
from pool_worker.engines.formats.openai_completions import cached_of, choice_of, ended_by, model_of
from pool_worker.engines.framing import Framing


class TrtLlmFormat:
    """``trtllm-serve``'s ``/v1/completions`` as a WireFormat."""

    asked_in: Medium = "ids"
    answers_in: Medium = "ids"
    keeps_blanks = True
    health_path = "/health"
    facts_path = "/v1/models"
    generate_path = "/v1/completions"
    framing: Framing = "server-sent events"
    honoured = SAMPLING | {"seed", "min_tokens"}
    grammars = frozenset({"json_schema", "json_object", "regex"})
    takes_cache_salt = False

    @staticmethod
    def facts(answer: Mapping[str, Any], model: str | None) -> ServerFacts:
        """Read the served model; the server reports no length."""
        return model_of(answer, model)

    @staticmethod
    def body(ask: ServerRequest) -> dict[str, Any]:
        """Build the body of a streaming request."""
        params = ask.params
        body: dict[str, Any] = {
            "model": ask.facts.model,
            "prompt": list(ask.token_ids),
            "max_tokens": ask.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": False},
            "detokenize": False,
            "add_special_tokens": False,
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
            "include_stop_str_in_output": True,  # include the token that ended it
        }
        if params.logit_bias:
            body["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
        if ask.seed is not None:
            body["seed"] = ask.seed
        if params.grammar is not None:
            body["response_format"] = _response_format(params.grammar.kind, params.grammar.source)
        return body

    @staticmethod
    def read(event: Mapping[str, Any], seen_tokens: int) -> Delta:
        """Read one event. An end token is not among the ids."""
        del seen_tokens
        choice = choice_of(event)
        if choice is None:
            return Delta(cached_tokens=cached_of(event))
        reason = ended_by(choice)
        return Delta(ids(choice.get("token_ids") or [], "token_ids"), ended_by="eos" if reason == "stop" else reason)


def _response_format(kind: str, source: str) -> dict[str, Any]:
    if kind == "json_object":
        return {"type": "json_object"}
    return {"type": "json", "schema": msgspec.json.decode(source)} if kind == "json_schema" else _pattern(source)


def _pattern(source: str) -> dict[str, Any]:
    return {"type": "regex", "regex": source}
