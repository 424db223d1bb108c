"""A model's default sampling parameters, from its card to the jobs of every API."""

from typing import Any

import pytest

from gateway.settings import ModelSettings
from tests.integration.gateway.scripted_worker import answer_hello
from tests.unit.gateway.conftest import Start
from tests.unit.gateway.local_gateway import MODEL, LocalGateway, card

OWN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
HELLO = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HELLO},
    "completions": {"prompt": "Hi"},
    "messages": {"messages": HELLO, "max_tokens": 9},
    "responses": {"input": "Hi"},
}


async def send(gateway: LocalGateway, path: str, body: dict[str, Any] | None = None) -> Any:
    answer = await (gateway.http().get(f"/v1/{path}") if body is None else gateway.post(f"/v1/{path}", **body))
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", BODIES)
async def test_model_defaults_replace_omitted_parameters(start_local: Start, path: str) -> None:
    gateway = await start_local(model_card=card(sampling=OWN))
    worker = await gateway.add_worker(script=answer_hello)
    answer = await send(gateway, path, BODIES[path])
    assert worker.attempts[0].job.sampling.defaults == OWN
    if path == "responses":
        assert (answer["temperature"], answer["top_p"]) == (0.6, 0.95)
    answer = await send(gateway, path, {**BODIES[path], "temperature": 1.0})
    assert worker.attempts[1].job.sampling.defaults == {"top_p": 0.95, "top_k": 20}
    assert worker.attempts[1].job.sampling.temperature == 1.0
    if path == "responses":
        assert (answer["temperature"], answer["top_p"]) == (1.0, 0.95)


@pytest.mark.parametrize("is_ignored", [False, True])
async def test_model_defaults_are_shown_unless_ignored(start_local: Start, is_ignored: bool) -> None:
    settings = ModelSettings(aliases=("short",), generation_config="ignore" if is_ignored else "auto")
    gateway = await start_local(model_card=card(sampling=OWN), models={MODEL: settings})
    worker = await gateway.add_worker(script=answer_hello)
    expected = {} if is_ignored else OWN
    [row] = (await send(gateway, "models"))["data"]
    assert row["default_parameters"] == (await send(gateway, f"models/{MODEL}"))["default_parameters"] == expected
    await send(gateway, "chat/completions", BODIES["chat/completions"])
    assert worker.attempts[0].job.sampling.defaults == expected
