"""Any server with OpenAI's ``POST /v1/completions``: text in, text out. Also the common parts of its imitations.

Documentation: https://platform.openai.com/docs/api-reference/completions
"""

from collections.abc import Mapping
from typing import Any

from pool_worker.engines.formats.base import Delta, Medium, NotServed, ServerFacts, ServerRequest, count, limit, text
from pool_worker.engines.framing import Framing, MalformedEvent
from pool_worker.engines.reported_ends import end_of_tokens


class OpenAICompletionsFormat:
    """OpenAI's ``/v1/completions`` as a WireFormat."""

    asked_in: Medium = "text"
    answers_in: Medium = "text"
    keeps_blanks = False
    health_path = "/v1/models"  # every such server has it
    facts_path = "/v1/models"
    generate_path = "/v1/completions"
    framing: Framing = "server-sent events"
    honoured = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed"})
    grammars: frozenset[str] = frozenset()
    takes_cache_salt = False

    @staticmethod
    def facts(answer: Mapping[str, Any], model: str | None) -> ServerFacts:
        """Read what the server reports about itself."""
        return model_of(answer, model)

    @staticmethod
    def body(ask: ServerRequest) -> dict[str, Any]:
        """Build the body of a streaming request. Fields unknown to OpenAI have vLLM's names."""
        given = {name: getattr(ask.params, name) for name in ask.facts.honoured or OpenAICompletionsFormat.honoured}
        if "min_tokens" in given:
            given["min_tokens"] = ask.min_tokens
        if ask.seed is None:
            given.pop("seed", None)
        else:
            given["seed"] = ask.seed
        if "logit_bias" in given:
            given["logit_bias"] = {str(token_id): bias for token_id, bias in ask.params.logit_bias.items()}
        return {
            "model": ask.facts.model,
            "prompt": ask.text,
            "max_tokens": ask.max_tokens,
            "stream": True,
            **given,
        }

    @staticmethod
    def read(event: Mapping[str, Any], seen_tokens: int) -> Delta:
        """Read one event. An event without a choice has the usage."""
        del seen_tokens
        choice = choice_of(event)
        if choice is None:
            return Delta(cached_tokens=cached_of(event))
        new_text = choice.get("text")
        if not isinstance(new_text, str):
            raise MalformedEvent("a choice without text")
        reason = ended_by(choice)
        return Delta(text=new_text, ended_by="eos" if reason == "stop" else reason, cached_tokens=cached_of(event))


def model_of(answer: Mapping[str, Any], model: str | None) -> ServerFacts:
    """Read ``/v1/models``: the requested model, or the first. Raises MalformedEvent."""
    models = answer.get("data")
    entries = [one for one in models if isinstance(one, dict)] if isinstance(models, list) else []
    chosen = next((one for one in entries if model is None or one.get("id") == model), None)
    if chosen is None or not isinstance(chosen.get("id"), str):
        raise NotServed(model, [str(one.get("id")) for one in entries])
    return ServerFacts(chosen["id"], limit(chosen.get("max_model_len")), weights=text(chosen.get("root")))


def choice_of(event: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return an event's choice; None if it has none. Raises MalformedEvent."""
    choices = event.get("choices")
    if not choices:
        return None
    if not isinstance(choices, list):
        raise MalformedEvent("choices that are not a list")
    if not isinstance(choices[0], dict):
        raise MalformedEvent("a choice that is not an object")
    return choices[0]


def ended_by(choice: Mapping[str, Any]) -> str | None:
    """Return "stop" or "length" if the choice has ended, else None. Raises ServerFailure for any other reason."""
    reason = choice.get("finish_reason")
    return None if reason is None or reason == "" else end_of_tokens(reason)


def cached_of(event: Mapping[str, Any]) -> int:
    """Return the cached prompt tokens by the usage; 0 if they are missing or implausible."""
    usage = event.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return count(details.get("cached_tokens")) or 0 if isinstance(details, dict) else 0
