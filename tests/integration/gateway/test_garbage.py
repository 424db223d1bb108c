"""Memory of a request is freed at its end: a large text in a reference cycle would stay until garbage collection.

Garbage collection depends on the number of objects, not on their size (``protocol.process``).
"""

import asyncio
import gc
from collections import Counter
from typing import Any
from weakref import ref

import httpx
import pytest

from benchmarks.http_client import ReadTimeouts, exchange, post_request
from gateway.dispatch.dispatcher import Dispatcher
from gateway.endpoints.endpoint import Endpoint
from protocol import subjects
from protocol.nats.bus import Bus
from tests.integration.gateway.conftest import MODEL, Share, Start
from tests.integration.gateway.scripted_worker import Attempt, answer_hello
from tests.waiting import HANGS_S, until

LARGE_CHARS = 300_000
LARGE = "x" * LARGE_CHARS
SAY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
ITEM: dict[str, Any] = {"model": MODEL, "input": [{"id": LARGE, "role": "user", "content": "Hi"}]}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
REQUESTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "answered": (CHAT, {**SAY, "junk": LARGE}, 200),
    "streamed": (CHAT, {**SAY, "junk": LARGE, "stream": True}, 200),
    "with an Idempotency-Key": (CHAT, {**SAY, "junk": LARGE}, 200),
    "completions": ("/v1/completions", {"model": MODEL, "prompt": "Hi", "max_tokens": 5, "junk": LARGE}, 200),
    "a response": (RESPONSES, ITEM, 200),
    "a stored response": (RESPONSES, {**ITEM, "store": True}, 200),
    "a response in the background": (RESPONSES, {**ITEM, "background": True}, 200),
    "a message": (MESSAGES, {**SAY, "metadata": {"user_id": "u", "junk": LARGE}}, 200),
    "tokenize": ("/tokenize", {"model": MODEL, "prompt": "Hi " * (LARGE_CHARS // 3)}, 200),
    "an invalid field": (CHAT, {**SAY, "junk": LARGE, "n": "many"}, 400),
    "too long a text": (CHAT, {**SAY, "user": LARGE}, 400),
    "too long a prompt": (CHAT, {**SAY, "messages": [{"role": "user", "content": "Hi " * (LARGE_CHARS // 3)}]}, 400),
    "no such model": (CHAT, {**SAY, "junk": LARGE, "model": "none"}, 404),
    "an invalid response": (RESPONSES, {**ITEM, "temperature": "hot"}, 400),
    "no such previous response": (RESPONSES, {**ITEM, "previous_response_id": "resp_none"}, 400),
    "an invalid message": (MESSAGES, {**SAY, "junk": LARGE, "max_tokens": 0}, 400),
    "an invalid embedding": ("/v1/embeddings", {"model": MODEL, "input": LARGE, "dimensions": -1}, 400),
    "an invalid batch": ("/v1/batches", {"input_file_id": LARGE, "endpoint": CHAT, "completion_window": "24h"}, 413),
    "an invalid batch of messages": (f"{MESSAGES}/batches", {"requests": [{"custom_id": LARGE, "params": SAY}]}, 400),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_large_body_is_freed_with_its_request(share_gateway: Share, name: str) -> None:
    gateway = await share_gateway()
    await gateway.add_worker()
    path, body, status = REQUESTS[name]
    headers = {"idempotency_key": "k"} if "Idempotency-Key" in name else {}
    request = post_request(path, gateway.key, body, **headers)
    gc.collect()
    gc.disable()
    try:
        done = await exchange(gateway.port, request, ReadTimeouts(HANGS_S, HANGS_S))
        assert done.status == status, done.body[:500]
        await until(lambda: is_over(gateway.bus))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert holders_of_large_texts() == Counter()
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def is_over(bus: Bus) -> bool:
    """Return whether no background response is running."""
    info = await bus.api(f"STREAM.INFO.{subjects.RESPONSES_STREAM}", {"subjects_filter": "res.*.*.run"})
    return not info["state"].get("subjects")


def holders_of_large_texts() -> Counter[str]:
    """Count the objects in reference cycles that hold a large text, by type."""
    return Counter(
        f"{type(one).__module__}.{type(one).__qualname__} {getattr(one, 'f_code', '')}"
        for one in gc.garbage
        for held in gc.get_referents(one)
        if isinstance(held, (bytes, bytearray, str)) and len(held) >= LARGE_CHARS
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_of_a_request_waits_for_the_garbage_collector(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Nor for the next request of the dispatcher: the first is answered after a wait, the second immediately."""
    gateway = await start_gateway()
    looked_at = asyncio.Event()

    held: list[ref[Any]] = []

    async def answer(attempt: Attempt) -> None:
        if len(held) <= 4:
            looked_at.clear()
            await looked_at.wait()
        await answer_hello(attempt)

    await gateway.add_worker(script=answer)
    serve, open_, tick_all = Endpoint._serve, Dispatcher.open, Dispatcher._tick_all

    async def noting_serve(self: Any, exchange: Any, *rest: Any) -> None:
        held.extend([ref(exchange), ref(exchange.reply.cycle)])
        await serve(self, exchange, *rest)

    def noting_open(self: Any, *rest: Any) -> Any:
        request = open_(self, *rest)
        held.extend([ref(request), ref(request.mailbox)])
        return request

    def noting_tick_all(self: Any, now_s: float, **rest: Any) -> None:
        tick_all(self, now_s, **rest)
        looked_at.set()

    monkeypatch.setattr(Dispatcher, "_tick_all", noting_tick_all)
    monkeypatch.setattr(Endpoint, "_serve", noting_serve)
    monkeypatch.setattr(Dispatcher, "open", noting_open)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    headers = {"authorization": f"Bearer {gateway.key}"}
    gc.disable()
    try:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
            for _ in range(2):
                assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
            first = held[:4]  # a connection keeps its last cycle
            await until(lambda: [one() for one in first] == [None] * 4)
    finally:
        gc.enable()
