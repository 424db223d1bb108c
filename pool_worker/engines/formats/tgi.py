"""Text Generation Inference: ``POST /generate_stream``. Takes text; every event has a token's id.

Written from its schema: docs/openapi.json of https://github.com/huggingface/text-generation-inference
(GenerateRequest, GenerateParameters, StreamResponse)
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pool_worker.engines.formats.base import Delta, Medium, Scored, ServerFacts, ServerRequest, limit, only_model, text
from pool_worker.engines.framing import Framing, MalformedEvent
from pool_worker.engines.reported_ends import end_of_tokens
from protocol.job import TokenId

_ENDS: Final = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


class TgiFormat:
    """TGI's ``/generate_stream`` as a WireFormat."""

    asked_in: Medium = "text"
    answers_in: Medium = "ids"
    keeps_blanks = True
    health_path = "/health"
    facts_path = "/info"
    generate_path = "/generate_stream"
    framing: Framing = "server-sent events"
    honoured = frozenset(
        {"temperature", "top_p", "top_k", "frequency_penalty", "repetition_penalty", "seed", "logprobs"}
    )
    grammars = frozenset({"json_schema", "regex"})
    takes_cache_salt = False

    @staticmethod
    def facts(answer: Mapping[str, Any], model: str | None) -> ServerFacts:
        """Read the server's only model."""
        path = answer.get("model_id")
        if not isinstance(path, str):
            raise MalformedEvent("/info has no model_id")
        length, requests = answer.get("max_total_tokens"), answer.get("max_concurrent_requests")
        memory = answer.get("max_batch_total_tokens")  # not in every release
        return ServerFacts(
            only_model(model, path) or path,
            limit(length),
            limit(requests),
            memory_tokens=limit(memory),
            weights=path,
            weights_version=text(answer.get("model_sha")),
        )

    @staticmethod
    def body(ask: ServerRequest) -> dict[str, Any]:
        """Build the body of a streaming request. Neutral values are out of its bounds, so they are omitted."""
        params = ask.params
        parameters: dict[str, Any] = {
            "max_new_tokens": ask.max_tokens,
            "return_full_text": False,
            "details": True,
            "do_sample": params.temperature > 0,
            "repetition_penalty": params.repetition_penalty,
            "frequency_penalty": params.frequency_penalty,
        }
        if params.temperature > 0:
            parameters["temperature"] = params.temperature
        if params.top_p < 1:
            parameters["top_p"] = params.top_p
        if params.top_k:
            parameters["top_k"] = params.top_k
        if ask.seed is not None:
            parameters["seed"] = ask.seed
        if params.logprobs:
            parameters["top_n_tokens"] = params.logprobs
        if params.grammar is not None:
            source = params.grammar.source
            is_schema = params.grammar.kind == "json_schema"
            parameters["grammar"] = (
                {"type": "json", "value": msgspec.json.decode(source)}
                if is_schema
                else {"type": "regex", "value": source}
            )
        return {"inputs": ask.text, "parameters": parameters}

    @staticmethod
    def read(event: Mapping[str, Any], seen_tokens: int) -> Delta:
        """Read one event. The last event has the details and the end token, if one ended it."""
        del seen_tokens
        try:
            read = msgspec.convert(event, _Event)
        except msgspec.ValidationError as error:
            raise MalformedEvent(str(error)) from error
        ended_by = None
        if read.details is not None:
            reason = read.details.finish_reason
            ended_by = _ENDS.get(reason) or end_of_tokens(reason)
        scored = Scored(read.token.logprob, [(one.id, one.logprob) for one in read.top_tokens])
        return Delta([read.token.id], scored=[scored], ended_by=ended_by)


class _Token(msgspec.Struct):
    id: TokenId
    logprob: float = 0.0


class _Details(msgspec.Struct):
    finish_reason: str


class _Event(msgspec.Struct):
    token: _Token
    top_tokens: list[_Token] = []
    details: _Details | None = None
