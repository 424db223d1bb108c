"""A bad model card affects only its model: cards are validated before use."""

import asyncio
import json
import re
from typing import Any

import httpx
import openai
import pytest
from msgspec.structs import replace

from gateway.settings import ModelSettings
from protocol.job import ModelCard
from protocol.nats import objects
from protocol.nats.bus import Bus
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, Start, card
from tests.small_tokenizer import byte_tokenizer_json
from tests.waiting import HANGS_S, until

BAD = "test/bad"
HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
RECURSIVE = "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"
NESTED = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)
TRAP = "{% if messages[0].content == 'boom' %}" + NESTED + "{% endif %}fine"


async def start(begin: Start | Share, **changes: Any) -> GatewayUnderTest:
    """Start a gateway with a good model and one with a bad card."""
    gateway = await begin(models={MODEL: ModelSettings(aliases=("short",)), BAD: ModelSettings()})
    await publish(gateway.bus, **changes)
    return gateway


async def publish(bus: Bus, data: bytes = b"", **changes: Any) -> None:
    data = data or byte_tokenizer_json()
    bad: ModelCard = replace(card(), model=BAD, tokenizer_object=objects.tokenizer_object_name(data), **changes)
    await objects.publish_model_card(bus, bad, data)


async def readiness(gateway: GatewayUnderTest) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        answer: dict[str, Any] = (await client.get("/readyz")).json()
        return answer


async def until_judged(gateway: GatewayUnderTest) -> None:
    async def is_judged() -> bool:
        told = await readiness(gateway)
        return BAD in told["models_unusable"] or BAD not in told["models_not_ready"]

    await until(is_judged)


async def the_good_one_answers(gateway: GatewayUnderTest) -> None:
    answer = await gateway.client().chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3)
    assert answer.choices[0].message.content is not None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"chat_template": RECURSIVE}, "RecursionError|time or memory"),  # a slow machine may hit either limit first
        ({"tool_template": NESTED}, "time or memory"),
        ({"context_length": 10**12}, "context length"),
        ({"data": b"{}"}, "tokenizer"),
    ],
)
async def test_only_its_model_is_not_served(share_gateway: Share, changes: dict[str, Any], reason: str) -> None:
    """A recursive template once crashed every gateway; a nested loop blocked all chats and the shutdown.

    More bad cards: tests/unit/gateway/tokenizing/test_cards.py.
    """
    gateway = await start(share_gateway, **changes)
    await gateway.add_worker()

    async def is_refused() -> bool:
        return BAD in (await readiness(gateway))["models_unusable"]

    await until(is_refused)
    client = gateway.client()
    with pytest.raises(openai.InternalServerError) as refused:
        await client.chat.completions.create(model=BAD, messages=HELLO)
    assert (refused.value.status_code, refused.value.code) == (503, "model_not_ready")
    assert re.search(reason, refused.value.message)
    assert re.search(reason, (await readiness(gateway))["models_unusable"][BAD])
    await the_good_one_answers(gateway)
    await publish(gateway.bus)  # the next card is good

    async def is_served() -> bool:
        return not (await readiness(gateway))["models_unusable"]

    await until(is_served)


async def test_a_conversation_that_takes_too_long(start_gateway: Start) -> None:
    """The card passed with a different conversation; this one kills its renderer, and the next gets a new one."""
    gateway = await start(start_gateway, chat_template=TRAP)
    await gateway.add_worker()
    await until_judged(gateway)
    assert (await readiness(gateway))["models_unusable"] == {}
    boom = [{"role": "user", "content": "boom"}]
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        client.headers["authorization"] = f"Bearer {gateway.key}"

        async def tokenized(messages: list[dict[str, str]]) -> httpx.Response:
            return await client.post("/tokenize", json={"model": BAD, "messages": messages})

        hanging = asyncio.create_task(tokenized(boom))
        await the_good_one_answers(gateway)
        refused = await hanging
        assert refused.status_code == 400
        assert "time or memory" in refused.text
        assert (await tokenized(HELLO)).json()["tokens"] == [69, 72, 77, 68]


async def test_the_process_ends_while_one_hangs(start_gateway: Start) -> None:
    """It once ignored SIGTERM while the template ran."""
    gateway = await start(start_gateway, chat_template=TRAP)
    await until_judged(gateway)
    boom = [{"role": "user", "content": "boom"}]
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        client.headers["authorization"] = f"Bearer {gateway.key}"
        hanging = asyncio.create_task(client.post("/tokenize", json={"model": BAD, "messages": boom}))
        await asyncio.sleep(0.1)
        await gateway.end()
        await asyncio.gather(hanging, return_exceptions=True)


async def test_a_tokenizer_that_gives_up(start_gateway: Start) -> None:
    """The library panics, which is not an Exception and once crashed the caller."""
    document = json.loads(byte_tokenizer_json())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, document["pre_tokenizer"]]}
    gateway = await start(start_gateway, data=json.dumps(document).encode())
    await gateway.add_worker()
    await until_judged(gateway)
    with pytest.raises(openai.APIStatusError):
        await gateway.client().chat.completions.create(
            model=BAD, messages=[{"role": "user", "content": "a" * 40 + "!"}]
        )
    await the_good_one_answers(gateway)
