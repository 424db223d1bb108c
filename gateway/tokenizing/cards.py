"""Checks of model cards. They come from model folders of any origin and are validated before use."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2

from gateway.errors import InvalidParameter
from gateway.tokenizing.model_tokens import AnyTemplate
from gateway.tokenizing.renderer import Renderer, RendererDied
from gateway.tokenizing.template_proof import unproven_reason
from gateway.tokenizing.templates import ChatTemplate, parsed
from gateway.tokenizing.turns import Message, find_rules

MAX_TEMPLATE_CHARS: Final = 256 * 1024  # ten times the longest known template
MAX_SPECIAL_TOKEN_CHARS: Final = 64 * 1024  # of all special tokens available to a template
MAX_TOKENIZER_BYTES: Final = 128 * 1024 * 1024  # the largest known has 33 MB
MAX_CONTEXT_LENGTH: Final = 64 * 1024 * 1024  # tokens
_PROBE: Final[list[dict[str, Any]]] = [{"role": "user", "content": "Hello"}]

log = logging.getLogger(__name__)


class UnusableCard(Exception):
    """A model cannot be served with its card. The message has the reason."""


def check_context_length(tokens: int) -> None:
    """Refuse impossible context lengths. Raises UnusableCard."""
    if not 0 < tokens <= MAX_CONTEXT_LENGTH:
        raise UnusableCard(f"its context length is {tokens}")


def check_tokenizer_size(count_bytes: int) -> None:
    """Refuse a tokenizer above the size limit. Raises UnusableCard."""
    if count_bytes > MAX_TOKENIZER_BYTES:
        raise UnusableCard(f"its tokenizer has {count_bytes} bytes; the limit is {MAX_TOKENIZER_BYTES}")


async def usable_template(model: str, source: str, special_tokens: Mapping[str, str]) -> AnyTemplate:
    """Return a chat template that has rendered (or refused) a probe conversation within its limits.

    It runs in the gateway's process only if it is proven to terminate quickly. Before that proof nothing of it has run
    here, not even its compilation, which evaluates constants. Raises UnusableCard, and Overloaded if the machine is too
    busy to decide.
    """
    if len(source) > MAX_TEMPLATE_CHARS or sum(map(len, special_tokens.values())) > MAX_SPECIAL_TOKEN_CHARS:
        raise UnusableCard(f"its chat template has {len(source)} characters; the limit is {MAX_TEMPLATE_CHARS}")
    try:
        reason = await asyncio.to_thread(_unproven_reason, source)
    except jinja2.TemplateSyntaxError as error:
        raise UnusableCard(f"its chat template is invalid: {error}") from error
    if reason is None:
        template = await asyncio.to_thread(ChatTemplate, source, special_tokens)
        with contextlib.suppress(InvalidParameter):  # it requires a different kind of conversation
            template.render(_PROBE)

        async def render(messages: Sequence[Message], tools: Sequence[Message]) -> str:
            return await asyncio.to_thread(template.render, messages, tools=tools)

        template.rules = await find_rules(render)
        return template
    log.info("model %s: its chat template is rendered in a separate process: %s", model, reason)
    return await _renderer(source, special_tokens)


def _unproven_reason(source: str) -> str | None:
    try:
        return unproven_reason(parsed(source))
    except RecursionError:
        return "it is nested too deeply"


async def _renderer(source: str, special_tokens: Mapping[str, str]) -> Renderer:
    renderer = Renderer(source, special_tokens)
    try:
        await renderer.start()
        await renderer.probe(_PROBE)
        renderer.rules = await find_rules(lambda messages, tools: renderer.render(messages, tools=tools))
    except (RendererDied, InvalidParameter) as error:
        await renderer.close()
        raise UnusableCard(f"its chat template cannot be used: {error}") from error
    return renderer
