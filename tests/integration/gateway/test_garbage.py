"""A request's memory, prompt and answer included, is freed as it ends, not whenever garbage is collected."""

import gc
from typing import Any
from weakref import ref

import httpx
import pytest

from gateway.api.endpoint import Endpoint
from gateway.dispatch.dispatcher import Dispatcher
from tests.integration.gateway.conftest import MODEL, Start
from tests.waiting import HANGS_S, until


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_of_a_request_waits_for_the_garbage_collector(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    gateway = await start_gateway()
    await gateway.add_worker()
    held: list[ref[Any]] = []
    serve, open_ = Endpoint._serve, Dispatcher.open

    async def noting_serve(self: Any, exchange: Any, *rest: Any) -> None:
        held.extend([ref(exchange), ref(exchange._cycle)])
        await serve(self, exchange, *rest)

    def noting_open(self: Any, *rest: Any) -> Any:
        request = open_(self, *rest)
        held.extend([ref(request), ref(request.mailbox)])
        return request

    monkeypatch.setattr(Endpoint, "_serve", noting_serve)
    monkeypatch.setattr(Dispatcher, "open", noting_open)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    headers = {"authorization": f"Bearer {gateway.key}"}
    gc.disable()
    try:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
            for _ in range(2):
                assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
            first = held[:4]  # a connection remembers the last cycle it had
            await until(lambda: [one() for one in first] == [None] * 4)
    finally:
        gc.enable()
