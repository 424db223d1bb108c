"""Sampling parameters from the public request fields; what the client left out keeps Sampling's defaults."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gateway.api.json_schema import enforceable
from gateway.api.schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from gateway.api.schema_check import SchemaCheck
from protocol.job import Sampling

_SAME_NAME = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "n",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")


def requested_max_tokens(request: GenerationRequest) -> tuple[str, int] | None:
    """Return the field that limits the output, and its value; None if the client named none."""
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return None if request.max_tokens is None else ("max_tokens", request.max_tokens)


def sampling_of(
    request: GenerationRequest,
    max_tokens: int,
    check: SchemaCheck | None = None,
    defaults: Mapping[str, float] = MappingProxyType({}),
    *,
    is_enforced: bool = True,
) -> Sampling:
    """Return the wire form of a request's sampling fields. ``check``: see ``json_schema``; raises as it does.

    ``defaults``: the model's own. Without ``is_enforced`` the grammar is left out.
    """
    given: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    given |= {name: tuple(value) for name in _LISTS if (value := getattr(request, name))}
    if request.top_k is not None and request.top_k > 0:
        given["top_k"] = request.top_k
    return Sampling(
        defaults={name: value for name, value in defaults.items() if getattr(request, name) is None},
        max_tokens=max_tokens,
        logprobs=_logprobs(request),
        grammar=enforceable(request.grammar, check) if is_enforced else None,
        prompt_logprobs=wanted_of_prompt(request),
        **given,
    )


def wanted_of_prompt(request: GenerationRequest) -> int | None:
    """Return how many candidates' logprobs are requested for each prompt token; None: none at all."""
    wanted = [request.prompt_logprobs]
    if isinstance(request, CompletionRequest) and request.echo:
        wanted.append(request.logprobs)
    return max((count for count in wanted if count is not None), default=None)


def _logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, ChatCompletionRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    return request.logprobs if isinstance(request, CompletionRequest) else None
