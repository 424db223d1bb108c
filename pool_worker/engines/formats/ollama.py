"""Ollama: ``POST /api/generate`` in raw mode; lines of JSON instead of server-sent events, and no token ids.

Documentation: https://docs.ollama.com/api/generate and https://docs.ollama.com/openapi.yaml
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pool_worker.engines.formats.base import Delta, Medium, NotServed, ServerFacts, ServerRequest, text
from pool_worker.engines.framing import Framing, MalformedEvent
from pool_worker.engines.reported_ends import end_of_tokens

_ENDS: Final = {"stop": "eos", "length": "length"}


class OllamaFormat:
    """Ollama's ``/api/generate`` as a WireFormat."""

    asked_in: Medium = "text"
    answers_in: Medium = "text"
    keeps_blanks = True
    health_path = "/api/version"
    facts_path = "/api/tags"
    generate_path = "/api/generate"
    framing: Framing = "lines"
    honoured = frozenset(
        {
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "seed",
        }
    )
    grammars = frozenset({"json_schema", "json_object"})
    takes_cache_salt = False

    @staticmethod
    def facts(answer: Mapping[str, Any], model: str | None) -> ServerFacts:
        """Find the requested model, or the first one; the server reports no length here."""
        models = answer.get("models")
        entries = [one for one in models if isinstance(one, dict)] if isinstance(models, list) else []
        digests = {str(one.get("name")): one.get("digest") for one in entries}
        chosen = next((name for name in digests if model is None or name in {model, f"{model}:latest"}), None)
        if chosen is None:
            raise NotServed(model, list(digests))
        return ServerFacts(chosen, weights_version=text(digests[chosen]))

    @staticmethod
    def body(ask: ServerRequest) -> dict[str, Any]:
        """Build the body, with all defaults of the server and the model's file switched off.

        Without ``num_ctx`` it would silently truncate the prompt, and with ``shift`` silently drop its beginning.
        """
        params = ask.params
        options: dict[str, Any] = {
            "num_ctx": ask.max_model_len,
            "num_predict": ask.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repeat_penalty": params.repetition_penalty,
            "repeat_last_n": -1,  # penalties are over the whole text
            "stop": [],
        }
        if ask.seed is not None:
            options["seed"] = ask.seed % 2**31
        body: dict[str, Any] = {
            "model": ask.facts.model,
            "prompt": ask.text,
            "raw": True,
            "stream": True,
            "think": False,
            "truncate": False,
            "shift": False,
            "options": options,
        }
        if params.grammar is not None:
            source = params.grammar.source
            body["format"] = msgspec.json.decode(source) if source else "json"
        return body

    @staticmethod
    def read(event: Mapping[str, Any], seen_tokens: int) -> Delta:
        del seen_tokens
        new_text = event.get("response")
        if not isinstance(new_text, str):
            raise MalformedEvent("an event without a response")
        if event.get("thinking"):  # the answer was split in two at an unknown place
            raise MalformedEvent("the server separated the model's thinking from its answer")
        if event.get("done") is not True:
            return Delta(text=new_text)
        reason = event.get("done_reason")
        return Delta(text=new_text, ended_by=_ENDS.get(str(reason)) or end_of_tokens(reason))
