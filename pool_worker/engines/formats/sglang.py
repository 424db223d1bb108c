"""SGLang's own endpoint: ``POST /generate`` with ``input_ids``; every event repeats the output from its first token.

Documentation: https://docs.sglang.ai/basic_usage/native_api.html and .../sampling_params.html
"""

from collections.abc import Mapping
from typing import Any

from pool_worker.engines.formats.base import (
    SAMPLING,
    Delta,
    Medium,
    ServerFacts,
    ServerRequest,
    count,
    ids,
    only_model,
    text,
)
from pool_worker.engines.framing import Framing, MalformedEvent, ServerFailure
from pool_worker.engines.reported_ends import end_of_tokens


class SGLangFormat:
    """SGLang's ``/generate`` as a WireFormat."""

    asked_in: Medium = "ids"
    answers_in: Medium = "ids"
    keeps_blanks = True
    health_path = "/health"
    facts_path = "/get_model_info"
    generate_path = "/generate"
    framing: Framing = "server-sent events"
    honoured = SAMPLING | {"min_tokens"}
    grammars = frozenset({"json_schema", "regex"})
    takes_cache_salt = True

    @staticmethod
    def facts(answer: Mapping[str, Any], model: str | None) -> ServerFacts:
        """Read the server's only model; it reports no length here."""
        path = answer.get("model_path")
        served = only_model(model, answer.get("served_model_name"), path)
        if served is None:
            raise MalformedEvent("/get_model_info has no model_path")
        return ServerFacts(
            served,
            weights=text(path),
            weights_version=text(answer.get("weight_version")),
            tokenizer=text(answer.get("tokenizer_path")),
        )

    @staticmethod
    def body(ask: ServerRequest) -> dict[str, Any]:
        """Build the body of a streaming request."""
        params = ask.params
        sampling: dict[str, Any] = {
            "max_new_tokens": ask.max_tokens,
            "min_new_tokens": ask.min_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
            "ignore_eos": params.ignore_eos,
            "stop_token_ids": list(params.stop_token_ids),
            "skip_special_tokens": False,
        }
        if params.logit_bias:
            sampling["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
        if params.grammar is not None:
            sampling["json_schema" if params.grammar.kind == "json_schema" else "regex"] = params.grammar.source
        body = {"input_ids": list(ask.token_ids), "sampling_params": sampling, "stream": True}
        return body | {"extra_key": ask.cache_salt} if ask.cache_salt else body

    @staticmethod
    def read(event: Mapping[str, Any], seen_tokens: int) -> Delta:
        reported = event.get("meta_info")
        if not isinstance(reported, dict):
            raise MalformedEvent("an event without meta_info")
        output = ids(event.get("output_ids"), "output_ids")
        made = reported.get("completion_tokens")
        # Servers with --stream-output-ids-incremental send only new ids; the count tells which form it is.
        is_whole = len(output) == made if isinstance(made, int) else True
        new = output[seen_tokens:] if is_whole else output
        reason = reported.get("finish_reason")
        kind = reason.get("type") if isinstance(reason, dict) else None
        if kind == "abort":
            raise ServerFailure(str(reason.get("message") if isinstance(reason, dict) else reason))
        return Delta(
            new,
            ended_by=None if kind is None else end_of_tokens(kind),
            cached_tokens=count(reported.get("cached_tokens")) or 0,
        )
