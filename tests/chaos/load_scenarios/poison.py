"""Everything that is poisonous, at once and again and again, with restarts, beside one who only works.

A stolen worker's records and heartbeats, lines that nobody can read, responses that cannot be taken over, and requests
that are large once they are opened. All of it is there again after each restart. ``plan.seconds`` is how long it goes
on; each kind comes every ``PERIOD_S``.
"""

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from html import unescape
from typing import Any, Final

import httpx
import msgspec
import psutil

from console.login.admins import set_password
from protocol import subjects
from protocol.job import encode
from protocol.nats.clock import unix_now_ms
from protocol.nats.topology import HEARTBEAT_PERIOD_S
from protocol.usage import encode_usage
from spillway.children import Child
from tests.chaos.load_scenarios.hostile import (
    HOSTILE,
    INNOCENT,
    Crowd,
    figures,
    meanwhile,
    publish_poisoned_card,
    raw_request,
)
from tests.chaos.load_scenarios.hostile import HOSTILE_SHAPE as BESIDE_OTHERS
from tests.chaos.load_scenarios.plan import Stage, expect
from tests.chaos.system import MODEL, System
from tests.usage_records import attempt_record

TOKENS: Final = 20
RATE_PER_S: Final = 10.0
ALONE_S: Final = 30.0
PERIOD_S: Final = 5.0
PAUSE_S: Final = 0.5
BEATS: Final = 20  # of each stolen worker
SET_ASIDE_LIMIT_S: Final = 60.0
GROWTH_LIMIT_MIB: Final = 300.0
SAMPLE_PERIOD_S: Final = 0.1
LOOK_PERIOD_S: Final = 1.0
LEAVE_S: Final = 5.0  # as long as the balancer needs to see that a gateway leaves
PASSWORD: Final = "correct horse battery"
NESTED: Final = b"\x91" * 1_100 + b"\x90"  # msgpack, deeper than Python's stack
DEEP_LINE: Final = b"[" * 1_500
BODY_BYTES: Final = 3_900_000
STOLEN: Final = f"{MODEL}.stolen.1"  # a worker's id
SHAPE: Final = replace(
    BESIDE_OTHERS,
    gateways=2,
    limited={},
    gateway_timeouts={"leave_s": LEAVE_S, "shutdown_s": 30.0},
)


@dataclass
class Poisoned:
    """One item that is to be set aside: where the dashboard must name it, and how."""

    kind: str
    page: str  # of the dashboard
    name: re.Pattern[str]  # how the page names it
    since_s: float = field(default_factory=time.monotonic)
    found_after_s: float | None = None


@dataclass
class Table:
    """Puts poison in front of everybody, and keeps what must be set aside."""

    system: System
    items: list[Poisoned] = field(default_factory=list)
    told: Counter[str] = field(default_factory=Counter)  # statuses, by what was asked
    served: int = 0

    # --- a stolen worker ----------------------------------------------------------------------------------------------

    async def serve_records(self) -> None:
        """Publish usage records on which the decoder, the numbers, or the database fail."""
        subject = subjects.attempt_usage_subject(MODEL, STOLEN)
        nan, large = {"usd_per_hour": float("nan")}, {"completion_tokens": 2**40}
        for poison in (
            NESTED,
            b"\x91\x82\xa1v\x01\xa3zzz" + NESTED,
            *(encode_usage([encode(attempt_record("x", pool=MODEL, worker_id=STOLEN, **one))]) for one in (nan, large)),
        ):
            sequence = await self.system.bus.publish_durable(subject, poison, message_id=f"poison {self._next()}")
            self._expect("usage record", "/set-aside", f"in message {sequence}</code></td><td>{re.escape(STOLEN)}<")

    async def serve_heartbeats(self) -> None:
        """Beat with another day's clock, a price that is none, or a depth that is none; each as another worker."""
        now_ms = unix_now_ms()
        beat: dict[str, Any] = {"v": 1, "pool": MODEL, "provider": "p", "region": "r", "tier": "spot", "engine": "e"}
        beat |= {"models": [MODEL], "usd_per_hour": 0.5, "max_sequences": 1, "max_kv_tokens": 1, "free_sequences": 0}
        beat |= {"free_kv_tokens": 0, "running": 0, "started_unix_ms": now_ms, "sent_unix_ms": now_ms}
        beats: dict[str, bytes] = {}
        for change in ({"usd_per_hour": float("nan")}, {"sent_unix_ms": 2**52}, {"busy_ms": -(2**62)}, None):
            worker_id = f"{STOLEN}-{self._next()}"
            poison = NESTED if change is None else msgspec.msgpack.encode({**beat, "worker_id": worker_id, **change})
            beats[subjects.heartbeat_subject(worker_id)] = poison
            self._expect("machine time", "/set-aside", f"<code>{re.escape(worker_id)}</code>")
        for _ in range(BEATS):
            for heartbeat, poison in beats.items():
                await self.system.bus.publish(heartbeat, poison)
            await asyncio.sleep(HEARTBEAT_PERIOD_S)

    async def serve_runs(self) -> None:
        """Leave a response in the background that no gateway can read, as a broken one would."""
        name = f"resp_poison_{self._next()}"
        subject = subjects.response_subject("nobody", name, "run")
        await self.system.bus.publish_durable(subject, b"zlib\nrubbish", message_id=name)
        self._expect("response", "/set-aside", f"<code>{name}</code>")

    # --- a caller -----------------------------------------------------------------------------------------------------

    async def serve_batches(self) -> None:
        """Upload a line that is nested too deep, and ask for it as a batch."""
        async with self._client() as client:
            file = await client.post("/v1/files", files={"file": ("lines.jsonl", DEEP_LINE)}, data={"purpose": "batch"})
            self.told[f"file {file.status_code}"] += 1
            if file.status_code != httpx.codes.OK:
                return
            asked = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            batch = await client.post("/v1/batches", json=asked)
            self.told[f"batch {batch.status_code}"] += 1
            if batch.status_code == httpx.codes.OK:
                self._expect("batch", f"/batches/{batch.json()['id']}", "invalid_json_line")

    async def serve_stored(self) -> None:
        """Store responses with junk, go on from them, and read them again."""
        junk = "j" * BODY_BYTES
        item = {"role": "user", "content": "Say [[tokens=2]]", "junk": junk}
        async with self._client() as client:
            previous: dict[str, str] = {}
            for _ in range(3):
                body = {"model": MODEL, "input": [item], "store": True, "max_output_tokens": 16, **previous}
                made = await client.post("/v1/responses", json=body)
                self.told[f"stored {made.status_code}"] += 1
                if made.status_code != httpx.codes.OK:
                    return
                previous = {"previous_response_id": made.json()["id"]}
            for path in ("", "/input_items"):
                read = await client.get(f"/v1/responses/{previous['previous_response_id']}{path}")
                self.told[f"read {read.status_code}"] += 1

    async def serve_background(self) -> None:
        """Ask for responses in the background that are as large as may be."""
        body = {"model": MODEL, "background": True, "max_output_tokens": 16}
        async with self._client() as client:
            item = {
                "id": "i" * (BODY_BYTES // 2),
                "role": "user",
                "content": "Say [[tokens=2]]",
            }  # an id costs no tokens
            for _ in range(3):
                made = await client.post("/v1/responses", json={**body, "input": [item]})
                self.told[f"background {made.status_code}"] += 1

    async def serve_raw(self) -> None:
        """Send what no JSON library writes: numbers that are none, depth, two encodings, tokens without end."""
        chat, key = "/v1/chat/completions", self.system.tenant_keys[HOSTILE]
        ask = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Say [[tokens=2]]"}], "junk": 0})
        in_background = json.dumps({"model": MODEL, "background": True, "input": [{"role": "user", "junk": 0}]})
        tokens = json.dumps({"model": MODEL, "tokens": [1] * (BODY_BYTES // 4)}).encode()
        one = {"custom_id": "x" * 30, "params": {"model": MODEL, "max_tokens": 1, "messages": []}}
        batch = json.dumps({"requests": [one] * (BODY_BYTES // len(json.dumps(one)))}).encode()
        crowd = Crowd(self.system, self.told)
        for name, path, body in (
            ("nan", chat, ask.replace('"junk": 0', '"junk": NaN').encode()),
            ("1e400", chat, ask.replace('"junk": 0', '"junk": 1e400').encode()),
            ("nan in background", "/v1/responses", in_background.replace('"junk": 0', '"junk": NaN').encode()),
            ("deep", chat, DEEP_LINE),
            ("tokens", "/detokenize", tokens),
            ("messages", "/v1/messages/batches", batch),
            ("no such response", "/v1/responses", b'{"model": "chaos", "input": "x", "previous_response_id": NaN}'),
        ):
            await crowd.send(name, raw_request(path, key, body))
        twice = raw_request(chat, key, b"0\r\n\r\n").replace(
            b"Content-Length: 5", b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked"
        )
        await crowd.send("two encodings", twice)

    async def serve_uploads(self) -> None:
        """Hold places for uploads, with a byte now and then."""
        head = (
            f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.system.tenant_keys[HOSTILE]}\r\n"
            "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 100000\r\n\r\n--x\r\n"
        ).encode()
        await Crowd(self.system, self.told).hold("slow uploads", head, 16, 4 * PERIOD_S)

    def _client(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.system.tenant_keys[HOSTILE]}"}
        return httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.system.port}", headers=headers, timeout=SET_ASIDE_LIMIT_S
        )

    def _expect(self, kind: str, page: str, name: str) -> None:
        self.items.append(Poisoned(kind, page, re.compile(name)))

    def _next(self) -> int:
        self.served += 1
        return self.served

    @property
    def dishes(self) -> dict[Callable[[], Awaitable[None]], float]:
        """Each kind, and the seconds between two of it."""
        often = (self.serve_raw, self.serve_stored, self.serve_background)
        rare = (self.serve_records, self.serve_heartbeats, self.serve_runs, self.serve_batches, self.serve_uploads)
        return {**dict.fromkeys(often, PAUSE_S), **dict.fromkeys(rare, PERIOD_S)}

    def all_served(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield what serves each kind, again and again."""
        for dish, wait_s in self.dishes.items():
            yield self._again_and_again(dish, wait_s)

    async def _again_and_again(self, dish: Callable[[], Awaitable[None]], wait_s: float) -> None:
        while True:
            try:
                await dish()
            except (OSError, httpx.HTTPError) as error:  # the gateway that it went to has left
                self.told[f"{dish.__name__} {type(error).__name__}"] += 1
            await asyncio.sleep(wait_s)


@dataclass
class Operator:
    """Somebody who looks at the dashboard."""

    system: System
    items: list[Poisoned]

    async def look(self) -> None:
        """Look for what is not found yet, for ever."""
        await set_password(self.system.database, PASSWORD, "cli:chaos", cost=16)
        async with httpx.AsyncClient(timeout=30.0) as client:
            for port in itertools.cycle(self.system.gateway_ports):
                with contextlib.suppress(httpx.HTTPError):  # it leaves, or begins
                    await self._look_once(client, f"http://127.0.0.1:{port}")
                await asyncio.sleep(LOOK_PERIOD_S)

    async def _look_once(self, client: httpx.AsyncClient, gateway: str) -> None:
        if not client.cookies:
            await client.post(f"{gateway}/login", data={"name": "admin", "password": PASSWORD, "next": "/dashboard"})
        for path in sorted({item.page for item in self.items if item.found_after_s is None}):
            text = "".join([page async for page in self._pages(client, gateway, path)])
            for item in self.items:
                if item.found_after_s is None and item.page == path and item.name.search(text):
                    item.found_after_s = time.monotonic() - item.since_s

    async def _pages(self, client: httpx.AsyncClient, gateway: str, path: str) -> AsyncIterator[str]:
        """Yield a page and those of older items."""
        address: str | None = f"{gateway}/dashboard{path}"
        while address is not None:
            answer = await client.get(address)
            if answer.status_code != httpx.codes.OK:
                return
            yield answer.text
            older = re.search(r'href="([^"]*[?&;]older=[^"]*)"', answer.text)
            address = None if older is None else gateway + unescape(older[1])

    async def wait(self) -> None:
        """Wait until all is found, or it is too late for the last."""
        while any(item.found_after_s is None for item in self.items):
            if time.monotonic() > max(item.since_s for item in self.items) + SET_ASIDE_LIMIT_S:
                return
            await asyncio.sleep(LOOK_PERIOD_S)


async def poison(stage: Stage) -> None:
    """Nothing stops, the innocent one's p99 stays within twice of what it is alone, and each item is set aside."""
    system, callers, plan, report = stage.system, stage.callers, stage.plan, stage.report
    await publish_poisoned_card(system)
    alone = await callers.offer(RATE_PER_S, min(ALONE_S, plan.seconds), tokens=TOKENS, tenant=INNOCENT)
    memory, table = Memory(system), Table(system)
    sampling = asyncio.create_task(memory.sample())
    operator = Operator(system, table.items)
    looking = asyncio.create_task(operator.look())
    psutil.cpu_percent()
    async with meanwhile(table.all_served()):
        restarting = asyncio.create_task(_restart(system, plan.seconds, report.extras))
        beside = await callers.offer(RATE_PER_S, plan.seconds, tokens=TOKENS, tenant=INNOCENT)
        report.faults = await restarting
    report.extras["machine_busy_percent"] = psutil.cpu_percent()
    await operator.wait()
    for task in (sampling, looking):
        task.cancel()
    for ending in await asyncio.gather(sampling, looking, return_exceptions=True):
        if not isinstance(ending, asyncio.CancelledError):
            report.offend(f"nobody looked any more: {ending!r}")
    report.extras["told"] = dict(sorted(table.told.items()))
    usual_ms = figures(report, "alone", alone)
    expect(report, "latency_ms_p99", figures(report, "beside", beside), at_most=2 * usual_ms * plan.slack)
    report.extras["mib_before"], report.extras["mib_most"] = memory.before_mib, memory.peak_mib
    expect(report, "grown_mib", memory.grown_mib, at_most=GROWTH_LIMIT_MIB)
    _judge_items(stage, table.items)
    for child in (*system.gateways, system.ledger):
        if not child.is_running:
            report.offend(f"{child.name} has ended")


def _judge_items(stage: Stage, items: list[Poisoned]) -> None:
    """Each was named on the dashboard in time."""
    by_kind: dict[str, list[Poisoned]] = {}
    for item in items:
        by_kind.setdefault(item.kind, []).append(item)
    stage.report.extras["items"] = {kind: len(of_kind) for kind, of_kind in by_kind.items()}
    for kind, of_kind in by_kind.items():
        missing = [item.name.pattern for item in of_kind if item.found_after_s is None]
        if missing:
            stage.report.offend(
                f"the dashboard does not name {len(missing)} of {len(of_kind)} of {kind}: {missing[:3]}"
            )
        latest_s = max((item.found_after_s for item in of_kind if item.found_after_s is not None), default=None)
        limit_s = SET_ASIDE_LIMIT_S * stage.plan.slack
        expect(stage.report, f"{kind.replace(' ', '_')}_set_aside_s", latest_s, at_most=limit_s)


async def _restart(system: System, seconds: float, extras: dict[str, Any]) -> int:
    """Kill the ledger, and let one gateway after the other leave, twice each; all of it begins again."""
    steps = [system.ledger, *system.gateways] * 2
    for child in steps:
        await asyncio.sleep(seconds / (len(steps) + 1))
        if child is system.ledger:
            await system.kill(child)
        else:
            await child.stop()
        await system.restart(child)
    extras["restarts"] = Counter(child.name for child in steps)
    return len(steps)


@dataclass
class Memory:
    """The resident memory of gateways and ledger, each process beside what it had when it was first seen at rest."""

    system: System
    before_mib: dict[str, float] = field(default_factory=dict)  # by child; the first of its processes
    peak_mib: dict[str, float] = field(default_factory=dict)

    @property
    def grown_mib(self) -> float:
        """Of the process that grew most."""
        return max(self.peak_mib[name] - before for name, before in self.before_mib.items())

    async def sample(self) -> None:
        """Look for ever."""
        while True:
            for name, mib in self._now():
                self.before_mib.setdefault(name, mib)
                self.peak_mib[name] = max(mib, self.peak_mib.get(name, 0.0))
            await asyncio.sleep(SAMPLE_PERIOD_S)

    def _now(self) -> Iterator[tuple[str, float]]:
        children: list[Child] = [*self.system.gateways, self.system.ledger]
        for child in children:
            with contextlib.suppress(psutil.Error):
                yield child.name, round(psutil.Process(child.pid).memory_info().rss / 2**20, 1)
