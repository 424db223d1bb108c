"""Everything that one caller has tried against all others, at once, beside one who only works.

The hostile ones speak to a gateway directly: a balancer would keep some of it away. Each goes on until it is over,
whatever it is answered. The scripted engine follows no grammar: what one costs a worker is
measured in tests/unit/engine.
"""

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import psutil
from msgspec.structs import replace

from benchmarks.http_client import post_request
from db.accounts.principal import Policy
from protocol import subjects
from protocol.nats.objects import get_object, publish_model_card, read_model_card
from tests.chaos.ledger import settled_refusals
from tests.chaos.load_scenarios.callers import Asked, ttfts_ms
from tests.chaos.load_scenarios.plan import Stage, expect
from tests.chaos.report import Report, percentile
from tests.chaos.system import MODEL, Shape, System

INNOCENT, HOSTILE, LIMITED = "innocent", "hostile", "limited"
COUNTED = "count, limited"  # the attack of LIMITED
POISONED = "poisoned"  # a model whose card is hostile
TOKENS = 20
RATE_PER_S = 10.0
ALONE_S = 15.0
SETTLE_S = 2.0  # the attacks have begun
UNREAD_STREAMS = 20
HALF_SENT = 100
HOLD_S = 20.0
RECEIVE_BUFFER_BYTES = 16 * 1024
BODY_BYTES = 4_000_000
GROWTH_LIMIT_MIB = 1024.0  # one text of 4 MB takes up to 500 while it is counted
SAMPLE_PERIOD_S = 0.1
READ_LIMIT_S = 60.0
PAUSE_S = 0.25  # between two attempts: it is not their client that is measured, nor how much work fits into a machine
HOSTILE_SHAPE = Shape(
    workers=2,
    inter_token_s=0.02,
    tenants={INNOCENT: 1.0, HOSTILE: 1.0},
    limited={LIMITED: Policy(requests_per_minute=1)},
    other_models=(POISONED,),
)
RECURSIVE_TEMPLATE = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"


@dataclass
class Crowd:
    """The hostile callers, and what they were answered."""

    system: System
    told: Counter[str] = field(default_factory=Counter)  # by attack and status

    def key(self, name: str) -> str:
        return self.system.tenant_keys[name]

    async def send(self, attack: str, request: bytes) -> None:
        """One request on a connection of its own; the answer is read and thrown away."""
        reader, writer = await self._connect()
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                writer.write(request)
                head = await reader.readuntil(b"\r\n")
                self.told[f"{attack} {head.split()[1].decode()}"] += 1
                while await reader.read(1 << 16):
                    pass
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            self.told[f"{attack} cut"] += 1
        finally:
            writer.close()

    async def hold(self, attack: str, request: bytes, count: int, seconds: float) -> None:
        """Many connections on which nothing is ever read, each left and made again after a while."""

        async def one() -> None:
            while True:
                _, writer = await self._connect()
                self.told[attack] += 1
                try:
                    writer.write(request)
                    await asyncio.sleep(seconds)
                finally:
                    writer.transport.abort()

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(_again_and_again(one))

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        # The kernel, too, shall take little of what nobody reads.
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.system.gateway_ports[0]))
        return await asyncio.open_connection(sock=connection, limit=1 << 16)


def _body(**rest: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Say [[tokens=2000]]"}], **rest}


def raw_request(path: str, key: str, body: bytes) -> bytes:
    """Return a request whose body need not be JSON."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _attacks(crowd: Crowd) -> dict[str, Callable[[], Awaitable[None]]]:
    """Each by its name, to be done again and again."""
    chat, key, limited = "/v1/chat/completions", crowd.key(HOSTILE), crowd.key(LIMITED)
    text = "hello world how are you " * (BODY_BYTES // 24)
    logprobs = {"logprobs": True, "top_logprobs": 20, "max_tokens": 2000}
    requests = {
        "too complex": raw_request(chat, key, json.dumps(_body(guided_grammar="[[too complex]]")).encode()),
        "large answer": raw_request(chat, key, json.dumps(_body(n=16, **logprobs)).encode()),
        "large pattern": raw_request(chat, key, json.dumps(_body(guided_regex="a" * BODY_BYTES)).encode()),
        "count": raw_request("/tokenize", key, json.dumps({"model": MODEL, "prompt": text}).encode()),
        COUNTED: raw_request("/tokenize", limited, json.dumps({"model": MODEL, "prompt": text}).encode()),
        "too long": raw_request(chat, key, json.dumps(_body(messages=[{"role": "user", "content": text}])).encode()),
        "countless lists": raw_request(chat, key, b'{"x": [' + b"[]," * (BODY_BYTES // 3) + b"0]}"),
        "long stop strings": raw_request(chat, key, json.dumps(_body(stop=["ab" * 256] * 16, max_tokens=50)).encode()),
        "poisoned": raw_request(chat, key, json.dumps(_body(model=POISONED)).encode()),
        "large head": f"GET / HTTP/1.1\r\nHost: x\r\nX: {'a' * BODY_BYTES}\r\n\r\n".encode(),
    }
    stream = raw_request(chat, key, json.dumps(_body(stream=True, **logprobs)).encode())
    pipelined = post_request(chat, key, _body(max_tokens=1)) * 5
    half = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "

    def sending(name: str, request: bytes) -> Callable[[], Awaitable[None]]:
        return lambda: crowd.send(name, request)

    return {
        **{name: sending(name, request) for name, request in requests.items()},
        "unread streams": lambda: crowd.hold("unread streams", stream, UNREAD_STREAMS, HOLD_S),
        "half-sent heads": lambda: crowd.hold("half-sent heads", half, HALF_SENT, HOLD_S),
        "pipelined": lambda: crowd.hold("pipelined", pipelined, 1, 4 * PAUSE_S),
    }


async def _again_and_again(attack: Callable[[], Awaitable[None]]) -> None:
    while True:
        with contextlib.suppress(OSError):
            await attack()
        await asyncio.sleep(PAUSE_S)


@contextlib.asynccontextmanager
async def meanwhile(works: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Do all of this at once, until the context ends."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def hostile(stage: Stage) -> None:
    """An innocent tenant's p99 beside all of them stays within twice what it is alone, and no request of his fails."""
    system, callers, plan, report = stage.system, stage.callers, stage.plan, stage.report
    await publish_poisoned_card(system)
    alone = await callers.offer(RATE_PER_S, min(ALONE_S, plan.seconds), tokens=TOKENS, tenant=INNOCENT)
    gateway = psutil.Process(system.gateways[0].pid)
    before_mib = gateway.memory_info().rss / 2**20
    peaks_mib = [before_mib]
    sampling = asyncio.create_task(_sample(gateway, peaks_mib))
    crowd = Crowd(system)
    psutil.cpu_percent()
    async with meanwhile(_again_and_again(attack) for attack in _attacks(crowd).values()):
        await asyncio.sleep(SETTLE_S)
        beside = await callers.offer(RATE_PER_S, plan.seconds, tokens=TOKENS, tenant=INNOCENT)
    report.extras["machine_busy_percent"] = psutil.cpu_percent()
    sampling.cancel()
    await _compare_refusals(crowd, report)
    report.extras["told"] = dict(sorted(crowd.told.items()))
    report.extras["gateway_mib_before"] = round(before_mib, 1)
    usual_ms = figures(report, "alone", alone)
    expect(report, "latency_ms_p99", figures(report, "beside", beside), at_most=2 * usual_ms * plan.slack)
    expect(report, "gateway_grown_mib", max(peaks_mib) - before_mib, at_most=GROWTH_LIMIT_MIB)


async def _compare_refusals(crowd: Crowd, report: Report) -> None:
    """Compare what the limited caller was refused with what the ledger has counted."""
    statuses = [(text.rpartition(" ")[2], number) for text, number in crowd.told.items() if text.startswith(COUNTED)]
    told = sum(number for status, number in statuses if status.isdigit() and int(status) >= HTTPStatus.BAD_REQUEST)
    counted = await settled_refusals(crowd.system.database, crowd.system.key_ids[LIMITED], told)
    # The attack was broken off in the end, perhaps just when its last request was refused.
    expect(report, "refusals_counted", counted, at_most=told + 1)
    if counted < max(told, 1):
        report.offend(f"{counted} refusals are counted, of {told} that the limited caller was told")


def figures(report: Report, when: str, asked: list[Asked]) -> float:
    """The 99th percentile of the whole answers' latencies."""
    latencies_ms = [one.record.latency_s * 1000 for one in asked]
    for per_cent in (50, 99):
        report.extras[f"latency_ms_p{per_cent}_{when}"] = percentile(latencies_ms, per_cent)
        report.extras[f"ttft_ms_p{per_cent}_{when}"] = percentile(ttfts_ms(asked), per_cent)
    return percentile(latencies_ms, 99) or 0.0


async def publish_poisoned_card(system: System) -> None:
    """Publish a card whose template calls itself for ever, as a worker could."""
    card = await read_model_card(system.bus, MODEL)
    assert card is not None
    tokenizer = await get_object(system.bus, subjects.ARTIFACTS_BUCKET, card.tokenizer_object)
    await publish_model_card(system.bus, replace(card, model=POISONED, chat_template=RECURSIVE_TEMPLATE), tokenizer)


async def _sample(process: psutil.Process, peaks_mib: list[float]) -> None:
    while True:
        peaks_mib.append(process.memory_info().rss / 2**20)
        await asyncio.sleep(SAMPLE_PERIOD_S)
