"""The routes with SDK types, and a valid request of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

PREVIOUS: Final = "the id of a response that is stored"
HEADERS: Final = {  # parameters that the SDK sends as headers
    "user_profile_id": "anthropic-user-profile-id",
    "workspace_id": "anthropic-workspace-id",
}
SCHEMA: Final = {"type": "object", "properties": {"river": {"type": "string"}}}
HELLO: Final[list[Any]] = [{"role": "user", "content": "Hi"}]


@dataclass(frozen=True)
class Sdk:
    """One route."""

    path: str
    section: str  # the route in the heading of its section
    params: Any  # the SDK's type
    body: Mapping[str, Any]  # required fields
    beside: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # additional fields that a parameter requires, by path
    examples: Mapping[str, Any] = field(default_factory=dict)  # example values by path
    after: Mapping[str, list[Any]] = field(default_factory=dict)  # items to append to a list, by parameter
    of_any_type: frozenset[str] = frozenset()  # model output of any type, by path
    opaque: frozenset[str] = frozenset()  # free-form objects of the client, by path
    further: frozenset[str] = frozenset()  # parameters missing from the type
    makes_vectors: bool = False


FUNCTION: Final = {"name": "f", "parameters": SCHEMA}
TOOLS: Final = {"tools": [{"type": "function", "function": FUNCTION}]}

CHAT = Sdk(
    "/v1/chat/completions",
    "POST /v1/chat/completions",
    chat_create_params.CompletionCreateParamsStreaming,
    {"messages": HELLO},
    beside={
        "top_logprobs": {"logprobs": True},
        "stream_options": {"stream": True},
        "tool_choice": TOOLS,
        "function_call": {"functions": [FUNCTION]},
    },
    examples={
        "messages": HELLO,
        "modalities": ["text", "audio"],
        "logit_bias": {"5": 1},
        "tools[function].function": FUNCTION,
        "functions[]": FUNCTION,
        "function_call.name": "f",
        "tool_choice[function].function.name": "f",
        "response_format[json_schema].json_schema": {"name": "x", "schema": SCHEMA},
        "response_format[json_schema].json_schema.schema": SCHEMA,
        "max_tokens": 9,
        "max_completion_tokens": 9,
    },
    of_any_type=frozenset(
        {
            "messages[assistant].function_call.arguments",
            "messages[assistant].tool_calls[function].function.arguments",
        }
    ),
)
COMPLETIONS = Sdk(
    "/v1/completions",
    "POST /v1/completions",
    completion_create_params.CompletionCreateParamsStreaming,
    {"prompt": "Hi"},
    beside={"stream_options": {"stream": True}},
    examples={"prompt": "Hi", "max_tokens": 9, "logit_bias": {"5": 1}, "best_of": 2},
)
EMBEDDINGS = Sdk(
    "/v1/embeddings",
    "POST /v1/embeddings",
    embedding_create_params.EmbeddingCreateParams,
    {"input": "Hi"},
    examples={"dimensions": 3},
    makes_vectors=True,
)
RESPONSES = Sdk(
    "/v1/responses",
    "POST /v1/responses",
    response_create_params.ResponseCreateParamsStreaming,
    {"input": "Hi"},
    beside={"tool_choice": {"tools": [{"type": "function", **FUNCTION}]}},
    examples={
        "input": "Hi",
        "include": ["reasoning.encrypted_content"],
        "tools[function]": FUNCTION,
        "tools[namespace]": {"name": "n", "description": "", "tools": [{"type": "function", **FUNCTION}]},
        "tools[namespace].tools[function]": FUNCTION,
        "tool_choice[function].name": "f",
        "tool_choice[custom].name": "f",
        "text.format[json_schema].schema": SCHEMA,
        "truncation": "auto",
        "previous_response_id": PREVIOUS,
        "max_output_tokens": 9,
        "reasoning.mode": "standard",
        "input[function_call_output]": {"call_id": "c", "output": "x"},
    },
    after={"input": HELLO},  # some items are not a conversation by themselves
    of_any_type=frozenset({"input[function_call].arguments"}),
)
_MESSAGES: Final[dict[str, Any]] = {
    "body": {"messages": HELLO, "max_tokens": 9},
    "beside": {"tool_choice": {"tools": [{"name": "f", "input_schema": SCHEMA}]}},
    "examples": {
        "messages": HELLO,
        "max_tokens": 9,
        "tools[custom]": {"name": "f", "input_schema": SCHEMA},
        "tools[custom].input_schema": SCHEMA,
        "messages[user].content[tool_result]": {"tool_use_id": "t", "content": "x"},
        "tool_choice[tool].name": "f",
        "output_config.format[json_schema].schema": SCHEMA,
        "speed": "fast",
    },
    "of_any_type": frozenset({"messages[assistant].content[tool_use].input"}),
    "opaque": frozenset({"tools[custom].input_schema"}),
    "further": frozenset({"temperature", "top_k", "top_p"}),  # of the SDK until its second version
}
MESSAGES = Sdk("/v1/messages", "POST /v1/messages", message_create_params.MessageCreateParamsStreaming, **_MESSAGES)
COUNT_TOKENS = Sdk(
    "/v1/messages/count_tokens", "POST /v1/messages", message_count_tokens_params.MessageCountTokensParams, **_MESSAGES
)
SDKS: Final = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES, COUNT_TOKENS)
