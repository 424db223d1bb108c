"""Size limits of a request, checked before it costs anything."""

from typing import Any, Final

import msgspec

from gateway.errors import ContextLengthExceeded, InvalidParameter
from gateway.settings import LimitSettings, ModelSettings
from gateway.tokenizing.model_tokens import prompt_too_long
from protocol.generation import Grammar

# --- fields -----------------------------------------------------------------------------------------------------------
#
# Size limits of fields other than the prompt.

MAX_GRAMMAR_CHARS: Final = 200_000  # of a schema, pattern or grammar; the engine has the same limit
MAX_BIASED_TOKENS: Final = 16_384  # named by logit_bias
MAX_OBJECT_BYTES: Final = 64 * 1024  # of chat_template_kwargs, as JSON
MAX_NAME_CHARS: Final = 1024  # of a name: user
MAX_DETOKENIZED_TOKENS: Final = 131_072  # of one request; blocks the event loop for 10 ms

SMALLEST_BYTES: Final = MAX_NAME_CHARS  # a smaller body cannot have a field that is too large

_encode_json = msgspec.json.Encoder().encode


def check_text(text: str | None, param: str, max_chars: int) -> None:
    """Raise InvalidParameter if a text is too long."""
    if text is not None and len(text) > max_chars:
        raise _too_large(param, f"{max_chars} characters", len(text))


def check_items(count: int, param: str, max_items: int) -> None:
    """Raise InvalidParameter if there are too many items."""
    if count > max_items:
        raise _too_large(param, f"{max_items} items", count)


def check_object(value: dict[str, Any] | None, param: str) -> None:
    """Raise InvalidParameter if an object is too large as JSON."""
    size = 0 if value is None else len(_encode_json(value))
    if size > MAX_OBJECT_BYTES:
        raise _too_large(param, f"{MAX_OBJECT_BYTES} bytes", size)


def check_grammar(grammar: Grammar) -> None:
    """Raise InvalidParameter if a schema, pattern or grammar is too large."""
    check_text(grammar.source, grammar.field, MAX_GRAMMAR_CHARS)


def _too_large(param: str, most: str, size: int) -> InvalidParameter:
    return InvalidParameter(f"'{param}' may have at most {most}, not {size}.", param=param, code="too_large")


# --- request limits ---------------------------------------------------------------------------------------------------
#
# Token limits of one request, checked once its prompt is tokenized.

AS_MANY_AS_FIT: Final = -1  # max_tokens value for the most that the limits allow, as in vLLM and llama.cpp


def check_shape(limits: LimitSettings, *, messages: int, choices: int) -> None:
    """Check sizes before the prompt is tokenized. Raises InvalidParameter."""
    if messages > limits.max_messages:
        raise InvalidParameter(f"At most {limits.max_messages} messages are allowed, not {messages}.", param="messages")
    if choices > limits.max_choices:
        raise InvalidParameter(f"'n' may be at most {limits.max_choices}, not {choices}.", param="n")


def check_prompts(limits: LimitSettings, prompts: int) -> None:
    """Check the number of prompts. Raises InvalidParameter."""
    if prompts > limits.max_prompts:
        raise InvalidParameter(
            f"'prompt' may hold at most {limits.max_prompts} prompts, not {prompts}.", param="prompt"
        )


def check_prompt_logprobs(limits: LimitSettings, *, prompt_tokens: int, candidates: int, param: str) -> None:
    """Check the number of prompt logprobs; ``param``: the field that requested them. Raises InvalidParameter."""
    wanted = prompt_tokens * (1 + candidates)
    if wanted > limits.max_prompt_logprobs:
        message = (
            f"{prompt_tokens} prompt tokens with {candidates} candidates each make {wanted} log-probabilities;"
            f" at most {limits.max_prompt_logprobs} are returned."
        )
        raise InvalidParameter(message, param=param)


def output_limit(
    limits: LimitSettings,
    model: ModelSettings,
    *,
    context_length: int,
    prompt_tokens: int,
    prompt_param: str,
    requested: tuple[str, int] | None,
    min_tokens: int,
    choices: int,
    usual_max_tokens: int | None = None,
) -> int:
    """Return the ``max_tokens`` of a request: the client's, or else the most that defaults and limits allow.

    ``usual_max_tokens`` is the API's own default, if any; ``prompt_param`` and the first part of ``requested``
    are the fields' names. Raises ContextLengthExceeded or InvalidParameter.
    """
    if prompt_tokens == 0:
        raise InvalidParameter(f"'{prompt_param}' contains no tokens.", param=prompt_param)
    if limits.max_prompt_tokens is not None and prompt_tokens > limits.max_prompt_tokens:
        message = f"The prompt has {prompt_tokens} tokens; at most {limits.max_prompt_tokens} are allowed."
        raise InvalidParameter(message, param=prompt_param, code="prompt_too_long")
    default = model.default_max_tokens or usual_max_tokens
    if requested is not None and requested[1] == AS_MANY_AS_FIT:
        requested = default = None
    _check_context(context_length, prompt_tokens, prompt_param, requested)
    left = _left(limits, context_length, prompt_tokens, choices)
    if left < 1 or (requested is not None and requested[1] > left):
        wanted = requested[1] if requested else 1
        message = (
            f"The request may use {prompt_tokens + wanted * choices} tokens in prompt and answers;"
            f" at most {limits.max_total_tokens} are allowed."
        )
        raise InvalidParameter(message, param=requested[0] if requested else prompt_param, code="too_many_tokens")
    max_tokens = requested[1] if requested is not None else min(left, default or left)
    if min_tokens > max_tokens:
        message = f"'min_tokens' ({min_tokens}) is more than the answer's limit of {max_tokens} tokens."
        raise InvalidParameter(message, param="min_tokens")
    return max_tokens


def _check_context(
    context_length: int, prompt_tokens: int, prompt_param: str, requested: tuple[str, int] | None
) -> None:
    if prompt_tokens >= context_length:
        raise prompt_too_long(context_length, prompt_tokens, prompt_param)
    if requested is not None and prompt_tokens + requested[1] > context_length:
        message = (
            f"This model's maximum context length is {context_length} tokens. However, you requested"
            f" {prompt_tokens + requested[1]} tokens ({prompt_tokens} in the {prompt_param}, {requested[1]} in the"
            f" completion). Please reduce the length of the {prompt_param}"
            " or completion."
        )
        raise ContextLengthExceeded(message, param=requested[0])


def _left(limits: LimitSettings, context_length: int, prompt_tokens: int, choices: int) -> int:
    left = context_length - prompt_tokens
    if limits.max_total_tokens is None:
        return left
    return min(left, (limits.max_total_tokens - prompt_tokens) // choices)
