"""Model cards come out of model folders, which may come from anywhere: they are judged before they are used."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any, Final

import jinja2

from tokens.chat_template import ChatTemplate, parsed
from tokens.model_tokens import AnyTemplate
from tokens.renderer import Renderer, RendererDied
from tokens.template_proof import why_unproven
from web.errors import InvalidParameter

MAX_TEMPLATE_CHARS: Final = 256 * 1024  # ten times the longest known
MAX_SPECIAL_TOKEN_CHARS: Final = 64 * 1024  # of all that a template may name
MAX_TOKENIZER_BYTES: Final = 128 * 1024 * 1024  # the largest known has 33 MB
MAX_CONTEXT_LENGTH: Final = 64 * 1024 * 1024  # tokens
_PROBE: Final[list[dict[str, Any]]] = [{"role": "user", "content": "Hello"}]

log = logging.getLogger(__name__)


class UnusableCard(Exception):
    """A model cannot be served with what its card says; the message tells why."""


def check_context_length(tokens: int) -> None:
    """Refuse lengths that cannot be. Raises UnusableCard."""
    if not 0 < tokens <= MAX_CONTEXT_LENGTH:
        raise UnusableCard(f"its context length is {tokens}")


def check_tokenizer_size(count_bytes: int) -> None:
    """Refuse a tokenizer that is larger than any. Raises UnusableCard."""
    if count_bytes > MAX_TOKENIZER_BYTES:
        raise UnusableCard(f"its tokenizer has {count_bytes} bytes; at most {MAX_TOKENIZER_BYTES} are loaded")


async def usable_template(model: str, source: str, special_tokens: Mapping[str, str]) -> AnyTemplate:
    """A chat template that has rendered a conversation within its limits, or refused to.

    In the gateway itself only where it is proven to end soon; until then nothing of it has run here, not even its
    compilation, which works out what is constant. Raises UnusableCard, and Overloaded where the machine is too busy to
    tell.
    """
    if len(source) > MAX_TEMPLATE_CHARS or sum(map(len, special_tokens.values())) > MAX_SPECIAL_TOKEN_CHARS:
        raise UnusableCard(f"its chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are taken")
    try:
        reason = await asyncio.to_thread(_why_elsewhere, source)
    except jinja2.TemplateSyntaxError as error:
        raise UnusableCard(f"its chat template is none: {error}") from error
    if reason is None:
        template = await asyncio.to_thread(ChatTemplate, source, special_tokens)
        with contextlib.suppress(InvalidParameter):  # it wants another conversation
            template.render(_PROBE)
        return template
    log.info("model %s: its chat template is rendered in a process of its own: %s", model, reason)
    return await _renderer(source, special_tokens)


def _why_elsewhere(source: str) -> str | None:
    try:
        return why_unproven(parsed(source))
    except RecursionError:
        return "it is nested too deeply"


async def _renderer(source: str, special_tokens: Mapping[str, str]) -> Renderer:
    renderer = Renderer(source, special_tokens)
    try:
        await renderer.start()
        await renderer.probe(_PROBE)
    except (RendererDied, InvalidParameter) as error:
        await renderer.close()
        raise UnusableCard(f"its chat template cannot be used: {error}") from error
    return renderer
