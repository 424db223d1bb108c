"""Differences between servers that speak OpenAI's chat format: one record each, from their documentation.

Fields that an API lacks are refused by name; nothing is dropped. An assistant message is continued only if the
server's documents say so. The documents are listed in docs/reference/engines.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_OPENAI: Final = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"})
_BIASED: Final = _OPENAI | {"logit_bias"}
_OPEN_MODELS: Final = frozenset({"top_k", "min_p", "repetition_penalty"})
_ENGINE_FIELDS: Final = frozenset({"min_tokens", "ignore_eos", "stop_token_ids"})
_BOTH_SCHEMAS: Final = frozenset({"json_object", "json_schema"})


@dataclass(frozen=True, slots=True)
class Profile:
    """One server's or API's profile. The defaults are OpenAI's."""

    path: str = "/v1/chat/completions"  # ``{model}`` and ``{api_version}`` are filled in
    health_path: str | None = None  # None: a hosted API, without health checks
    server: str | None = None  # as ChatFormat.server
    key_header: str | None = None  # None: the key is sent as a bearer token
    honoured: frozenset[str] = _OPENAI
    schemas: frozenset[str] = _BOTH_SCHEMAS
    limit_field: str = "max_tokens"
    seed_field: str = "seed"
    must_call: str = "required"  # its ``tool_choice`` that forces a tool call
    takes_names: bool = True  # the ``name`` of a message's author
    takes_effort: bool = True  # ``reasoning_effort``
    takes_single_call: bool = True  # ``parallel_tool_calls``
    # Body fields that switch reasoning on and off, where possible.
    thinking: Mapping[bool, dict[str, Any]] = field(default_factory=dict)
    salt_field: str | None = None  # the field that separates prompt caches
    asks_for_usage: bool = True  # ``stream_options``; otherwise usage is always sent
    # Fields that continue an assistant message; None: not supported.
    in_last_message: dict[str, Any] | None = None  # on the message
    in_body: dict[str, Any] = field(default_factory=dict)  # in the body
    continued_path: str | None = None  # another path for this, if any
    repeats_prefix: bool = False  # its answer repeats that message


_BY_TEMPLATE: Final[Mapping[bool, dict[str, Any]]] = {
    thinks: {"chat_template_kwargs": {"enable_thinking": thinks}} for thinks in (True, False)
}
_AS_VLLM: Final[dict[str, Any]] = {
    "honoured": _BIASED | _OPEN_MODELS | _ENGINE_FIELDS | {"bad_words", "allowed_token_ids"},
    "thinking": _BY_TEMPLATE,
    "in_last_message": {},
    "in_body": {"continue_final_message": True, "add_generation_prompt": False},
}

PROFILES: Final[dict[str, Profile]] = {
    "openai": Profile(limit_field="max_completion_tokens", honoured=_BIASED),
    "azure": Profile(
        path="/openai/deployments/{model}/chat/completions?api-version={api_version}",
        key_header="api-key",
        limit_field="max_completion_tokens",
        honoured=_BIASED,
    ),
    "openrouter": Profile(
        path="/api/v1/chat/completions",
        honoured=_BIASED | _OPEN_MODELS,
        thinking={thinks: {"reasoning": {"enabled": thinks}} for thinks in (True, False)},
    ),
    "together": Profile(honoured=_BIASED | _OPEN_MODELS, takes_single_call=False),
    "groq": Profile(path="/openai/v1/chat/completions", limit_field="max_completion_tokens", takes_names=False),
    "deepseek": Profile(
        path="/chat/completions",
        honoured=_OPENAI - {"seed"},
        schemas=frozenset({"json_object"}),
        takes_effort=False,
        takes_single_call=False,
        thinking={True: {"thinking": {"type": "enabled"}}, False: {"thinking": {"type": "disabled"}}},
        salt_field="user_id",
        in_last_message={"prefix": True},
        continued_path="/beta/chat/completions",
    ),
    "mistral": Profile(
        honoured=_OPENAI,
        seed_field="random_seed",
        must_call="any",
        takes_effort=False,
        asks_for_usage=False,
        in_last_message={"prefix": True},
        repeats_prefix=True,
    ),
    "gemini": Profile(
        path="/v1beta/openai/chat/completions",
        honoured=frozenset({"temperature", "top_p"}),
        takes_names=False,
        takes_single_call=False,
    ),
    "ray": Profile(health_path="/v1/models", server="openai_completions", honoured=_BIASED | _OPEN_MODELS),
    "openllm": Profile(health_path="/readyz", server="openai_completions", honoured=_BIASED | _OPEN_MODELS),
    "tgi": Profile(
        health_path="/health",
        server="tgi",
        honoured=_OPENAI,
        takes_effort=False,
        takes_single_call=False,
        in_last_message={},
        in_body={"continue_final_message": True},
    ),
    "vllm": Profile(health_path="/health", server="vllm", salt_field="cache_salt", **_AS_VLLM),
    "sglang": Profile(
        health_path="/health",
        server="sglang",
        honoured=_BIASED | _OPEN_MODELS | _ENGINE_FIELDS,
        thinking=_BY_TEMPLATE,
        salt_field="cache_salt",
        in_last_message={},
        in_body={"continue_final_message": True},
    ),
}
