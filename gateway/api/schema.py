"""Request bodies of the public API: OpenAI's fields plus vLLM's sampling fields.

Unknown fields are ignored. Known fields that this version does not support are refused by name (``UNSUPPORTED``),
never silently dropped. Types are strict: "5" is not a number.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeGuard

from pydantic import AfterValidator, BeforeValidator, Field

from gateway.api.fields import (
    MAX_TOOLS,
    BadItem,
    Body,
    FunctionChoice,
    FunctionDefinition,
    Message,
    ResponseFormat,
    StructuredOutputs,
    ToolChoice,
    ToolDefinition,
    check_message,
    check_tools,
    grammar_of,
    parse_body,
    refuse_unsupported,
    tool_choice_of,
    tools_of,
)
from gateway.api.values import check_values
from gateway.errors import InvalidParameter
from gateway.limits.sizes import (
    AS_MANY_AS_FIT,
    MAX_BIASED_TOKENS,
    MAX_DETOKENIZED_TOKENS,
    MAX_NAME_CHARS,
    SMALLEST_BYTES,
    check_items,
    check_object,
    check_text,
)
from protocol.generation import Grammar
from protocol.usage import MAX_TAG_VALUE_CHARS, MAX_TAGS

MAX_STOP_STRINGS: Final = 16
MAX_STOP_BYTES: Final = 8192  # of all together
MAX_LOGPROBS: Final = 20
MAX_ALLOWED_TOKENS: Final = 65_536
MAX_BAD_WORDS: Final = 128
MAX_SEED: Final = 2**63 - 1
MAX_TOKEN_ID: Final = 2**32 - 1

# Known fields that are not supported, with the values that match the default behavior.
_UNSUPPORTED_EVERYWHERE: Final[dict[str, tuple[Any, ...]]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "logits_processors": (),
    "logprob_token_ids": ([],),
}
_UNSUPPORTED_IN_CHAT: Final[dict[str, tuple[Any, ...]]] = {
    **_UNSUPPORTED_EVERYWHERE,
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning": (),
    "web_search_options": (),
    "moderation": (),
    "echo": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": (),
}
_UNSUPPORTED_IN_COMPLETIONS: Final[dict[str, tuple[Any, ...]]] = {
    **_UNSUPPORTED_EVERYWHERE,
    "suffix": ("",),
    "prompt_embeds": (),
}


def _stop_strings(stop: object) -> object:
    stops = [stop] if isinstance(stop, str) else stop
    if isinstance(stops, list) and not all(isinstance(text, str) and text for text in stops):
        raise ValueError("must be a string or a list of strings, none of them empty")
    if isinstance(stops, list) and len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"must hold at most {MAX_STOP_STRINGS} strings")
    if isinstance(stops, list) and sum(len(text.encode()) for text in stops) > MAX_STOP_BYTES:
        raise ValueError(f"must hold at most {MAX_STOP_BYTES} bytes in all")
    return stops


def _prompts(prompt: object) -> object:
    """Validate a prompt or a list of prompts. A list of one prompt equals that prompt."""
    if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)):
        _check_prompt(prompt)
        return prompt
    if len(prompt) == 1:
        [prompt] = prompt
        _check_prompt(prompt)
        return prompt
    for number, one in enumerate(prompt):
        try:
            _check_prompt(one)
        except ValueError as error:
            raise BadItem(number, str(error)) from error
    return prompt


def _check_prompt(prompt: object) -> None:
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list) or not prompt:
        raise ValueError("must be a string, or a non-empty list of token ids")
    if not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in prompt):
        raise ValueError("must hold token ids: non-negative integers")


def _integer_keys(bias: object) -> object:
    # JSON object keys are strings.
    if not isinstance(bias, Mapping):
        return bias
    if not all(isinstance(key, str) and key.isascii() and key.isdigit() for key in bias):
        raise ValueError("must have token ids as keys")
    return {int(key): value for key, value in bias.items()}


Prompt = str | list[int]  # text, or token ids
BadWord = Annotated[str, Field(pattern=r"\S", max_length=256)]
GUIDED: Final = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


def _some_tokens(tokens: int | None) -> int | None:
    if tokens is not None and tokens < 1 and tokens != AS_MANY_AS_FIT:
        raise ValueError("Input should be greater than or equal to 1, or -1 for the maximum")
    return tokens


MaxTokens = Annotated[int | None, AfterValidator(_some_tokens)]


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None  # events are never padded
    continuous_usage_stats: bool | None = None  # each chunk includes the running usage


# The answer says "flex" or "default"; the other tiers are served as "default".
ServiceTier = Literal["auto", "default", "priority", "flex", "scale", "fast", "ultrafast"]


Metadata = Annotated[
    dict[str, Annotated[str, Field(max_length=MAX_TAG_VALUE_CHARS)]], Field(max_length=MAX_TAGS)
]  # validated together with the header


class JobRequest(Body):
    """Base of requests that become jobs. ``None`` means the same as an omitted field."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    user: str | None = None
    safety_identifier: str | None = None  # newer name of ``user``
    service_tier: ServiceTier | None = None
    metadata: Metadata | None = None  # tags, like the header x-spillway-tags
    do_not_queue: bool | None = None
    allow_hosted: bool | None = None  # False: never; True: 403 if the key does not allow it

    @property
    def is_batch(self) -> bool:
        """True if the request has batch priority."""
        return self.service_tier == "flex"


class GenerationRequest(JobRequest):
    """Base of chat completions and completions."""

    max_tokens: MaxTokens = None
    min_tokens: Annotated[int | None, Field(ge=0)] = None
    n: Annotated[int | None, Field(ge=1)] = None
    best_of: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_stop_strings, str | list[str] | None)] = None
    stop_token_ids: Annotated[list[TokenId] | None, Field(max_length=128)] = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    seed: Annotated[int | None, Field(ge=-MAX_SEED, le=MAX_SEED)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None  # 0: only the most likely token
    top_k: Annotated[int | None, Field(ge=-1, le=MAX_TOKEN_ID)] = None  # 0 and -1: off
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None,
        BeforeValidator(_integer_keys, dict[str, float] | None),
    ] = None
    allowed_token_ids: Annotated[list[TokenId] | None, Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)] = None
    bad_words: Annotated[list[BadWord] | None, Field(max_length=MAX_BAD_WORDS)] = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None  # keep this many tokens; -1: as many as fit
    truncation_side: Literal["left", "right"] | None = None  # the end that is removed; None: "left"
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None  # accepted and ignored: chats are not stored
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None  # these fields: legacy names of structured_outputs
    guided_regex: Annotated[str | None, Field(min_length=1)] = None
    guided_choice: Annotated[list[str] | None, Field(min_length=1)] = None
    guided_grammar: Annotated[str | None, Field(min_length=1)] = None

    @property
    def grammar(self) -> Grammar | None:
        """Required output format; None: any."""
        for field, kind in GUIDED.items():
            if (value := getattr(self, field)) is not None:
                return grammar_of(kind, value, field)
        wanted = self.structured_outputs or self.response_format
        return None if wanted is None else wanted.grammar()

    @property
    def include_usage(self) -> bool:
        """True if the stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[ToolDefinition] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice = None  # None: "auto" if there are tools
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionDefinition] | None, Field(max_length=MAX_TOOLS)] = None  # legacy form of tools
    function_call: FunctionChoice = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # accepted and ignored

    @property
    def is_legacy(self) -> bool:
        """True if the answer reports calls as ``function_call``, for legacy clients."""
        return bool(self.functions)

    @property
    def adds_generation_prompt(self) -> bool:
        """True if the prompt ends with the start of a new assistant turn."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[Prompt | list[Prompt], BeforeValidator(_prompts)]
    max_tokens: Annotated[int | None, Field(ge=AS_MANY_AS_FIT)] = None
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, usually one."""
        return self.prompt if _are_several(self.prompt) else [self.prompt]  # type: ignore[list-item]


def _are_several(prompt: Prompt | list[Prompt]) -> TypeGuard[list[Prompt]]:
    return isinstance(prompt, list) and not isinstance(prompt[0], int)


class TokenizeRequest(Body):
    """Body of POST /tokenize, compatible with vLLM: a prompt or messages."""

    model: Annotated[str | None, Field(min_length=1, max_length=512)] = None
    prompt: str | None = None
    messages: Annotated[list[Message] | None, Field(min_length=1)] = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[ToolDefinition] | None, Field(max_length=MAX_TOOLS)] = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Body of POST /detokenize, compatible with vLLM."""

    model: Annotated[str | None, Field(min_length=1, max_length=512)] = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_DETOKENIZED_TOKENS, fail_fast=True)]


def parse_chat(body: bytes) -> ChatCompletionRequest:
    """Validate a chat body. Raises MalformedJson or InvalidParameter."""
    request = parse_body(ChatCompletionRequest, body)
    refuse_unsupported(request, _UNSUPPORTED_IN_CHAT)
    if len(body) > SMALLEST_BYTES:
        _check_sizes(request)
        check_object(request.chat_template_kwargs, "chat_template_kwargs")
    _refuse_contradictions(request)
    for number, message in enumerate(request.messages):
        check_message(message, f"messages.{number}.")
    called = [function for message in request.messages for function in message.called]
    if called:
        check_values(*[function.arguments.encode() for function in called], param="messages")
    request = _with_tools(request)
    check_tools(request.tools or (), request.tool_choice)
    if request.top_logprobs and not request.logprobs:
        raise InvalidParameter("'top_logprobs' requires 'logprobs' to be true.", param="top_logprobs")
    if request.continue_final_message and request.add_generation_prompt:
        text = "'continue_final_message' and 'add_generation_prompt' cannot be used together."
        raise InvalidParameter(text, param="continue_final_message")
    return request


def _with_tools(request: ChatCompletionRequest) -> ChatCompletionRequest:
    """Return the body with its legacy functions as tools. Raises InvalidParameter if it has both."""
    if not request.functions:
        return request
    for name in ("tools", "tool_choice"):
        if getattr(request, name):
            raise InvalidParameter(f"'functions' and '{name}' cannot be used together.", param="functions")
    tools = {"tools": tools_of(request.functions), "tool_choice": tool_choice_of(request.function_call)}
    return request.model_copy(update={**tools, "parallel_tool_calls": False})


def parse_completion(body: bytes) -> CompletionRequest:
    """Validate a completion body. Raises MalformedJson or InvalidParameter."""
    request = parse_body(CompletionRequest, body)
    refuse_unsupported(request, _UNSUPPORTED_IN_COMPLETIONS)
    if len(body) > SMALLEST_BYTES:
        _check_sizes(request)
    _refuse_contradictions(request)
    if request.include_usage and request.stream_options.continuous_usage_stats and len(request.prompts) > 1:  # type: ignore[union-attr]
        text = "'continuous_usage_stats' is not available with more than one prompt."
        raise InvalidParameter(text, param="stream_options.continuous_usage_stats")
    if request.max_tokens == 0 and not request.echo:
        raise InvalidParameter("'max_tokens' may be 0 only if 'echo' is true.", param="max_tokens")
    return request


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Validate a tokenize body. Raises MalformedJson or InvalidParameter."""
    request = parse_body(TokenizeRequest, body)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidParameter("Send either 'prompt' or 'messages', but not both.", param="prompt")
    return request


def _check_sizes(request: GenerationRequest) -> None:
    check_text(request.user, "user", MAX_NAME_CHARS)
    check_text(request.safety_identifier, "safety_identifier", MAX_NAME_CHARS)
    check_items(len(request.logit_bias or ()), "logit_bias", MAX_BIASED_TOKENS)


def _refuse_contradictions(request: GenerationRequest) -> None:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidParameter(
            "'best_of' other than 'n' is not supported.", param="best_of", code="unsupported_parameter"
        )
    forms = [name for name in ("structured_outputs", *GUIDED, "response_format") if getattr(request, name) is not None]
    if len(forms) > 1:
        raise InvalidParameter(f"'{forms[0]}' and '{forms[1]}' cannot be used together.", param=forms[0])
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidParameter("'prompt_logprobs' is not available when 'stream' is true.", param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise InvalidParameter("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
