"""A pool whose server does everything that upstream servers do wrong, one after the other, beside a healthy pool.

Each request that the server gets is answered in the next of the ways of ``WRONGS``. Some are answers that are only
written differently. Nobody may see any of it, and the server, which keeps count, is asked for no answer three times.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any, Final

from fastapi import Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from pool_worker.settings import ServerEngineSettings
from tests.chaos.load_scenarios.hosted_api import HostedApi, prepare_tokenizer
from tests.chaos.load_scenarios.hostile import figures
from tests.chaos.load_scenarios.plan import Stage, expect
from tests.chaos.system import Shape
from tests.conformance.replay import Fault, running
from tests.waiting import until

TOKENS: Final = 20
TOKEN_S: Final = 0.02
RATE_PER_S: Final = 8.0
ALONE_S: Final = 15.0
SILENCE_S: Final = 2.0
BEFORE: Final = 5  # events that come before an answer goes wrong
RIG_SLOT: Final = 1
PURCHASES: Final = 2  # of one answer, at most
UPSTREAMS_SHAPE = Shape(workers=1, max_sequences=32, inter_token_s=TOKEN_S)

Events = list[str]
Pieces = Callable[[Events], Sequence[str]]


@dataclass(frozen=True)
class Wrong:
    """One way to answer. ``is_bought``: a provider would be paid for it."""

    name: str
    answer: Callable[[Events], Response]
    is_bought: bool = True


def streamed(name: str, change: Pieces) -> Wrong:
    """Send other pieces than the events of an answer."""
    return Wrong(name, lambda events: StreamingResponse(_paced(change(events)), media_type="text/event-stream"))


async def _paced(pieces: Sequence[str]) -> AsyncIterator[str]:
    for piece in pieces:
        await asyncio.sleep(TOKEN_S)
        yield piece


def stuck(name: str, noise: str, before: int) -> Wrong:
    """Send a part of an answer, and noise for ever."""

    async def pieces(events: Events) -> AsyncIterator[str]:
        for event in events[:before]:
            yield event
        while True:
            await asyncio.sleep(SILENCE_S / 10)
            yield noise

    return Wrong(name, lambda events: StreamingResponse(pieces(events), media_type="text/event-stream"))


def refused(name: str, status: int, **headers: Callable[[], str]) -> Wrong:
    """Answer by a status."""

    def answer(_: Events) -> Response:
        named = {header.replace("_", "-"): value() for header, value in headers.items()}
        return JSONResponse({"error": {"message": name}}, status, named)

    return Wrong(name, answer, is_bought=False)


def reported(name: str, status: int) -> Wrong:
    """Report a status in the stream, before the answer begins."""
    return Wrong(
        name,
        lambda _: Response(
            f'data: {{"error": {{"code": {status}, "message": "{name}"}}}}\n\n', media_type="text/event-stream"
        ),
        is_bought=False,
    )


async def _broken(events: Events) -> AsyncIterator[str]:
    for event in events[:BEFORE]:
        yield event
    raise ConnectionError  # the connection is reset


WRONGS: Final = (
    streamed("cut", lambda e: e[:BEFORE]),
    refused("401", 401),
    refused("404: the model has another name", 404),
    refused("500", 500),
    streamed("CRLF", lambda e: [event.replace("\n", "\r\n") for event in e]),
    refused("429 for a second", 429, retry_after=lambda: "1"),
    Wrong("reset", lambda e: StreamingResponse(_broken(e), media_type="text/event-stream")),
    streamed("a byte order mark", lambda e: ["\ufeff" + e[0], *e[1:]]),
    stuck("comments for ever", ": ping\n\n", BEFORE),
    refused("429 until a date", 429, retry_after=lambda: formatdate(time.time() + 1, usegmt=True)),
    streamed("an error at last", lambda e: [*e[:BEFORE], 'data: {"error": {"message": "out of memory"}}\n\n']),
    streamed("no blank lines", lambda e: [event.removesuffix("\n") for event in e]),
    Wrong("a page", lambda _: HTMLResponse("<html>Log in</html>"), is_bought=False),
    Wrong("a page for an error", lambda _: HTMLResponse("<html>Bad gateway</html>", 502), is_bought=False),
    Wrong("JSON for a stream", lambda _: JSONResponse({"error": {"message": "dead"}}), is_bought=False),
    streamed("no error", lambda e: [event.replace("data: {", 'data: {"error": null, ') for event in e]),
    refused("429 for milliseconds", 429, retry_after_ms=lambda: "500"),
    streamed("an event of errors", lambda e: [*e[:BEFORE], 'event: error\ndata: {"message": "broken"}\n\n']),
    stuck("events without content", 'data: {"choices": []}\n\n', BEFORE),
    streamed("an unknown end", lambda e: [event.replace('"length"', '"whatever"') for event in e]),
    reported("429 in the stream", 429),
    streamed("malformed", lambda e: [*e[:BEFORE], "data: {not json\n\n", *e[BEFORE:]]),
    streamed("an end in capitals", lambda e: [event.replace('"length"', '"LENGTH"') for event in e]),
    streamed("too early an end", lambda e: [*e[:BEFORE], *(one for one in e if '"length"' in one), *e[-2:]]),
    refused("503 until a limit is whole", 503, x_ratelimit_reset_requests=lambda: "700ms"),
    streamed("an error line", lambda e: [*e[:BEFORE], 'error: {"message": "slot lost"}\n\n']),
    stuck("nothing at all", "", 0),
    streamed("pings between", lambda e: [event + ': ping\n\ndata: {"choices": []}\n\n' for event in e]),
    reported("500 in the stream", 500),
    streamed("nothing", lambda _: []),
)


@dataclass
class FaultyApi(HostedApi):
    """Answers each request in the next way; ``bought`` counts the answers by their prompts."""

    asked_for: set[str] = field(default_factory=set)  # prompts
    bought: Counter[str] = field(default_factory=Counter)
    played: Counter[str] = field(default_factory=Counter)  # by the names of the ways

    def __post_init__(self) -> None:
        super().__post_init__()
        self._turn = itertools.cycle(WRONGS)

    def fault_for(self, body: Mapping[str, Any]) -> Fault:
        """Implement ``Replay``: each request has its way. A probe of the worker's own is answered."""
        if not self.is_question(body):
            events = self.events_of(body, body["prompt"][:1] * body["max_tokens"])
            return lambda _: StreamingResponse(iter(events), media_type="text/event-stream")
        wrong = next(self._turn)
        prompt, tokens = self.made_for(body)
        self.asked_for.add(prompt)
        self.bought[prompt] += wrong.is_bought
        self.played[wrong.name] += 1

        def answer(_: Request) -> Response:
            return wrong.answer(self.events_of(body, tokens))

        return answer


@contextlib.contextmanager
def faulty_api(folder: Path) -> Iterator[tuple[FaultyApi, Path]]:
    """Let one run; returns it with a folder that has the model's tokenizer."""
    prepare_tokenizer(folder)
    with running(FaultyApi(token_s=TOKEN_S)) as api:
        yield api, folder


async def upstreams(stage: Stage) -> None:
    """Offer the load to the healthy pool alone, and to both for ``plan.seconds``."""
    system, callers, plan, report = stage.system, stage.callers, stage.plan, stage.report
    alone = await callers.offer(RATE_PER_S, min(ALONE_S, plan.seconds), tokens=TOKENS)
    with faulty_api(system.folder / "rig") as (api, tokenizer):
        engine = {"kind": "vllm", "url": api.url, "tokenizer": str(tokenizer), "max_sequences": 16}
        settings = ServerEngineSettings.model_validate({**engine, "silence_s": SILENCE_S})
        worker = await system.farm.spawn(RIG_SLOT, {"pool": "rig", "provider": "rig", "engine": settings})
        await until(lambda: system.watcher.has_beaten(worker.worker_id))
        beside = await callers.offer(RATE_PER_S, plan.seconds, tokens=TOKENS)
        await system.farm.stop()
    report.faults = sum(api.played.values())
    report.extras["played"] = dict(api.played)
    report.extras["asked_at_the_rig"] = len(api.asked_for)
    healthy = [one for one in beside if one.prompt not in api.asked_for]
    usual_ms = figures(report, "alone", alone)
    expect(report, "latency_ms_p99", figures(report, "healthy_half", healthy), at_most=2 * usual_ms * plan.slack)
    expect(report, "purchases_of_one_answer", max(api.bought.values(), default=None), at_most=PURCHASES)
    if missing := [wrong.name for wrong in WRONGS if not api.played[wrong.name]]:
        report.offend(f"the rig was not asked often enough to play {missing}")
