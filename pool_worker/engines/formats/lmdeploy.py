"""LMDeploy's own endpoint: ``POST /generate`` with ``input_ids``; every event has only the new ids.

Written from its schema: lmdeploy/serve/openai/protocol.py (GenerateReqInput, GenerateReqOutput) and
endpoints/generate.py of https://github.com/InternLM/lmdeploy
"""

from collections.abc import Mapping
from typing import Any, Final

from pool_worker.engines.formats.base import Delta, Medium, ServerFacts, ServerRequest, ids
from pool_worker.engines.formats.openai_completions import model_of
from pool_worker.engines.framing import Framing, MalformedEvent
from pool_worker.engines.reported_ends import end_of_tokens

_ENDS: Final = {"stop": "eos", "length": "length"}


class LMDeployFormat:
    """LMDeploy's ``/generate`` as a WireFormat."""

    asked_in: Medium = "ids"
    answers_in: Medium = "ids"
    keeps_blanks = True
    health_path = "/health"
    facts_path = "/v1/models"
    generate_path = "/generate"
    framing: Framing = "server-sent events"
    honoured = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos"})
    grammars: frozenset[str] = frozenset()
    takes_cache_salt = False

    @staticmethod
    def facts(answer: Mapping[str, Any], model: str | None) -> ServerFacts:
        """Read the served model; the server reports no length."""
        return model_of(answer, model)

    @staticmethod
    def body(ask: ServerRequest) -> dict[str, Any]:
        """Build the body of a streaming request."""
        params = ask.params
        return {
            "input_ids": list(ask.token_ids),
            "max_tokens": ask.max_tokens,
            "stream": True,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "ignore_eos": params.ignore_eos,
            "stop_token_ids": list(params.stop_token_ids),
            "include_stop_str_in_output": True,  # include the token that ended it
            "skip_special_tokens": False,
        }

    @staticmethod
    def read(event: Mapping[str, Any], seen_tokens: int) -> Delta:
        """Read one event. An end token is not among the ids."""
        del seen_tokens
        reported = event.get("meta_info")
        if not isinstance(reported, dict):
            raise MalformedEvent("an event without meta_info")
        new = ids(event.get("output_ids") or [], "output_ids")
        reason = reported.get("finish_reason")
        if reason is None:
            return Delta(new)
        kind = reason.get("type") if isinstance(reason, dict) else reason
        return Delta(new, ended_by=_ENDS.get(str(kind)) or end_of_tokens(kind))
