"""A template in a separate process renders the same text as in this process."""

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.api.schema import parse_chat
from gateway.errors import InvalidParameter, Overloaded
from gateway.tokenizing.renderer import Renderer, RendererDied
from gateway.tokenizing.templates import ChatTemplate
from tests import tool_templates
from tests.small_tokenizer import BOS
from tests.unit.protocol.dialects.test_prompts import CONVERSATION, WEATHER

SPECIAL = {"bos_token": BOS}
REFUSES = "{% if mine %}{{ raise_exception('not ' + mine) }}{% endif %}{{ messages[0].content }}"
ROOT = Path(__file__).resolve().parents[4]
Start = Callable[[str], Awaitable[Renderer]]


@pytest.fixture
async def renderer_of() -> AsyncIterator[Start]:
    """Return a function that starts a renderer; its process is stopped after the test."""
    renderers = []

    async def start(source: str) -> Renderer:
        renderers.append(Renderer(source, SPECIAL))
        await renderers[-1].start()
        return renderers[-1]

    yield start
    for renderer in renderers:
        await renderer.close()


async def test_the_same_text(renderer_of: Start) -> None:
    """The template concatenates arguments, which are objects elsewhere, to text."""
    deepseek = await renderer_of(tool_templates.DEEPSEEK_V31_STYLE)
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


async def test_no_secret_is_in_its_environment(renderer_of: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that escapes its sandbox could otherwise read the pepper and the database password."""
    for name in ("SPILLWAY_AUTH__PEPPER", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    renderer = await renderer_of(REFUSES)
    assert renderer._process is not None
    assert "secret" not in psutil.Process(renderer._process.pid).environ().values()


async def test_a_machine_that_is_too_busy() -> None:
    renderer = Renderer("{{ messages[0].content }}", SPECIAL, answer_limit_s=0.0)
    with pytest.raises(Overloaded, match="not rendered within 0 s"):
        await renderer.start()
    await renderer.close()


async def test_refusals_of_the_template(renderer_of: Start) -> None:
    renderer = await renderer_of(REFUSES)
    with pytest.raises(InvalidParameter, match="not me") as refused:
        await renderer.render([{"content": "x"}], variables={"mine": "me"})
    assert refused.value.param == "messages"
    with pytest.raises(InvalidParameter) as refused:
        await renderer.render([{"content": "x"}], variables={"messages": "me"})
    assert refused.value.param == "chat_template_kwargs.messages"
    assert await renderer.render([{"content": "x"}]) == "x"


async def test_a_dead_process_is_restarted(renderer_of: Start) -> None:
    renderer = await renderer_of(REFUSES)
    renderer.kill()
    assert await renderer.render([{"content": "x"}]) == "x"


async def test_modules_in_the_current_folder_are_not_imported(
    renderer_of: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tokens", "web"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)  # as spillway/__init__.py does
    renderer = await renderer_of(REFUSES)
    assert await renderer.render([{"content": "x"}]) == "x"


async def test_templates_that_cannot_be_compiled(renderer_of: Start) -> None:
    with pytest.raises(InvalidParameter, match="RecursionError|TemplateSyntaxError"):
        await renderer_of("{{ " + "(" * 5000 + ")" * 5000 + " }}")


@pytest.mark.slow
async def test_limits_of_time_and_memory(renderer_of: Start) -> None:
    renderer = await renderer_of("{% if mine %}{{ 'a' * (10 ** 11) }}{% endif %}x")
    with pytest.raises(InvalidParameter, match=r"MemoryError|time or memory"):
        await renderer.render([], variables={"mine": True})
    assert await renderer.render([]) == "x"
    with pytest.raises(RendererDied):
        await renderer_of("{{ 9 ** (9 ** 9) }}")


async def test_closing_leaves_no_process(renderer_of: Start) -> None:
    renderer = await renderer_of(REFUSES)
    assert renderer._process is not None
    pid = renderer._process.pid
    await renderer.close()
    with pytest.raises(ProcessLookupError):  # not even a zombie
        os.kill(pid, 0)
