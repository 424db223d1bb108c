"""A template rendered in a process of its own says what it would say here."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.api.errors import InvalidParameter
from gateway.api.schema import parse_chat
from gateway.tokens.chat_template import ChatTemplate
from gateway.tokens.renderer import Renderer, RendererDied
from tests import tool_templates
from tests.small_tokenizer import BOS
from tests.unit.gateway.tools.test_prompts import CONVERSATION, WEATHER

SPECIAL = {"bos_token": BOS}
REFUSES = "{% if mine %}{{ raise_exception('not ' + mine) }}{% endif %}{{ messages[0].content }}"


async def renderer_of(source: str) -> Renderer:
    renderer = Renderer(source, SPECIAL)
    await renderer.start()
    return renderer


@pytest.fixture
async def deepseek() -> AsyncIterator[Renderer]:
    renderer = await renderer_of(tool_templates.DEEPSEEK_V31_STYLE)
    yield renderer
    renderer.kill()


async def test_the_same_text(deepseek: Renderer) -> None:
    """Its template joins arguments to texts, which are objects elsewhere."""
    here = ChatTemplate(tool_templates.DEEPSEEK_V31_STYLE, SPECIAL)
    body = {"model": "m", "messages": CONVERSATION, "tools": [{"type": "function", "function": WEATHER}]}
    request = parse_chat(json.dumps(body).encode())
    messages = [message.for_template() for message in request.messages]
    asked: dict[str, Any] = {
        "tools": [tool.for_template() for tool in request.tools or ()],
        "variables": {"thinking": True},
    }
    assert await deepseek.render(messages, **asked) == here.render(messages, **asked)
    assert deepseek.variables == here.variables


async def test_what_the_template_refuses() -> None:
    renderer = await renderer_of(REFUSES)
    with pytest.raises(InvalidParameter, match="not me") as refused:
        await renderer.render([{"content": "x"}], variables={"mine": "me"})
    assert refused.value.param == "messages"
    with pytest.raises(InvalidParameter) as refused:
        await renderer.render([{"content": "x"}], variables={"messages": "me"})
    assert refused.value.param == "chat_template_kwargs.messages"
    assert await renderer.render([{"content": "x"}]) == "x"
    renderer.kill()


async def test_a_process_that_is_gone_is_started_again() -> None:
    renderer = await renderer_of(REFUSES)
    renderer.kill()
    assert await renderer.render([{"content": "x"}]) == "x"
    renderer.kill()


async def test_what_cannot_even_be_compiled() -> None:
    with pytest.raises(InvalidParameter, match="RecursionError|TemplateSyntaxError"):
        await renderer_of("{{ " + "(" * 5000 + ")" * 5000 + " }}")


async def test_limits_of_time_and_memory() -> None:
    renderer = await renderer_of("{% if mine %}{{ 'a' * (10 ** 11) }}{% endif %}x")
    with pytest.raises(InvalidParameter, match=r"MemoryError|time or memory"):
        await renderer.render([], variables={"mine": True})
    assert await renderer.render([]) == "x"
    renderer.kill()
    with pytest.raises(RendererDied):
        await renderer_of("{{ 9 ** (9 ** 9) }}")
