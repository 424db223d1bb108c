"""The faults of an inference server at one request, or at all; registered as ``upstream-<name>``.

Sixteen are those that lists of the field name for failover; the others were seen in the field, too. The pool that
misbehaves is the cheapest, so that it is asked first; another one of the same model stands beside it. Requests of the
load run at both meanwhile.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Final

from fastapi import Request
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from tests.chaos.servers import ReplayServer
from tests.chaos.strikes import FAULTS, Chaos, Ending, Strike, Wrong
from tests.conformance.replay import Fault
from tests.conformance.replay_events import events_of

MISBEHAVING, HEALTHY = "misbehaving", "healthy"  # pools
SILENCE_S: Final = 3.0  # [pools.misbehaving.engine] silence_s; on a busy machine a replay answers late, too
TRIES: Final = 20  # until a request is asked of the server that misbehaves
REFUSED_S: Final = 0.6  # how long nobody can connect
BEFORE: Final = 5  # events that come before a stream goes wrong
FIRST_SEED: Final = 1_000_000_000  # beyond those of the mix
Events = Callable[[list[str]], list[str]]


# --- ways to answer ---------------------------------------------------------------------------------------------------


def _changed(change: Events) -> Fault:
    """Answer as always, but with the events changed."""

    def answer(request: Request) -> Response:
        return _stream_of(change(events_of("vllm", request._json)))

    return answer


def _stream_of(events: list[str]) -> Response:
    return StreamingResponse(iter(events), media_type="text/event-stream")


def _paced(pace: Callable[[list[str]], AsyncIterator[str]]) -> Fault:
    """Answer with the events when ``pace`` says so."""

    def answer(request: Request) -> Response:
        return StreamingResponse(pace(events_of("vllm", request._json)), media_type="text/event-stream")

    return answer


async def _cut(events: list[str]) -> AsyncIterator[str]:
    for event in events[:BEFORE]:
        yield event
    raise ConnectionError  # the server's process breaks the connection off


async def _stalled(events: list[str]) -> AsyncIterator[str]:
    for event in events[:BEFORE]:
        yield event
    await asyncio.Event().wait()


async def _dribbling(events: list[str]) -> AsyncIterator[str]:
    """Byte by byte, so that the connection is never silent, and no token comes."""
    for event in events[:BEFORE]:
        yield event
    for character in events[BEFORE]:
        yield character
        await asyncio.sleep(SILENCE_S / 4)


async def _silent(events: list[str]) -> AsyncIterator[str]:
    del events
    yield ": \n\n"
    await asyncio.Event().wait()


def _late(by_s: float) -> Fault:
    async def late(events: list[str]) -> AsyncIterator[str]:
        await asyncio.sleep(by_s)
        for event in events:
            yield event

    return _paced(late)


def _status(status: int, code: str = "", message: str = "", **headers: str) -> Fault:
    error = {"error": {"message": message or f"status {status}", "type": "error", "code": code or None}}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _: JSONResponse(error, status, named)


def _with_usage(usage: object) -> Events:
    def change(events: list[str]) -> list[str]:
        return [*events[:-2], f"data: {json.dumps({'id': 'cmpl-1', 'choices': [], 'usage': usage})}\n\n", events[-1]]

    return change


def _ended_early(reason: str) -> Events:
    """After some tokens the server says that it is done."""
    return lambda events: [
        *events[:BEFORE],
        events[BEFORE].replace('"finish_reason": null', f'"finish_reason": "{reason}"'),
        *events[-2:],
    ]


# --- the list ---------------------------------------------------------------------------------------------------------

WRONGS: Final = (
    Wrong("cut", "breaks the connection off in mid-stream", (_paced(_cut),)),
    Wrong("stall", "stops in mid-stream and keeps the connection", (_paced(_stalled),)),
    Wrong("dribble", "goes on byte by byte", (_paced(_dribbling),)),
    Wrong("silent", "takes the request and says nothing", (_paced(_silent),)),
    Wrong(
        "429",
        "is busy, and says when to come back, or not",
        (_status(429, retry_after="0.2"), _status(429)),
        stays=True,
    ),
    Wrong("500", "fails", (_status(500),)),
    Wrong("503", "is overloaded, and says when to come back", (_status(503, retry_after="0.2"),), stays=True),
    Wrong(
        "malformed-chunk",
        "sends an event that is no JSON",
        (_changed(lambda e: [*e[:5], "data: {not json\n\n", *e[5:]]),),
    ),
    Wrong("empty-stream", "ends before it has begun", (_changed(lambda _: []), _changed(lambda e: e[-1:]))),
    Wrong(
        "context-too-long",
        "says that the prompt is too long",
        (_status(400, "context_length_exceeded", "the prompt is longer than this model's context"),),
        "own error",
        told="longer than this model's context",
    ),
    Wrong(
        "content-filter",
        "refuses what was asked",
        (_status(400, "content_filter", "the prompt was filtered"),),
        "own error",
        told="the prompt was filtered",
    ),
    Wrong(
        "wrong-usage",
        "counts wrongly, or not at all",
        tuple(
            _changed(_with_usage(usage))
            for usage in ({"prompt_tokens": 1, "completion_tokens": 999_999}, {"completion_tokens": -1}, None, "many")
        ),
        stays=True,
    ),
    Wrong(
        "truncated-finish",
        "ends too early, as if that were the end",
        # A [DONE] without a reason is an end (tests/conformance/test_odd_servers.py), so it is none of these.
        (_changed(_ended_early("length")), _changed(lambda e: e[:BEFORE])),
    ),
    Wrong("slow-first-byte", "begins late, or too late", (_late(SILENCE_S / 3), _late(SILENCE_S * 3)), stays=True),
    Wrong("refused", "takes no connections any more"),
    Wrong("model-gone", "does not know the model any more", (_status(404, "model_not_found"),)),
    Wrong("529", "is overloaded, in another word", (_status(529),), stays=True, listed=False),
    Wrong("key-revoked", "does not know our key any more", (_status(401), _status(403)), listed=False),
    Wrong("redirect", "sends us elsewhere", (lambda _: RedirectResponse("http://127.0.0.1:9/"),), listed=False),
    Wrong(
        "error-in-stream",
        "fails in mid-stream, and says so",
        (_changed(lambda e: [*e[:BEFORE], 'data: {"error": {"message": "out of memory"}}\n\n']),),
        listed=False,
    ),
)


# --- strikes ----------------------------------------------------------------------------------------------------------


def kind_of(wrong: Wrong) -> str:
    return f"upstream-{wrong.name}"


def _misbehaving(chaos: Chaos) -> ReplayServer:
    server = chaos.system.servers[MISBEHAVING]
    assert isinstance(server, ReplayServer)
    return server


async def _to_one_request(chaos: Chaos, wrong: Wrong) -> None:
    """Let the server do it to one request, which is asked now; do not wait for its end."""
    before = sum(strike.kind == kind_of(wrong) for strike in chaos.strikes)
    strike = chaos.strike(kind_of(wrong), chaos.system.workers_of(MISBEHAVING)[0], of=lambda _: False)
    strike.may_stay = wrong.stays
    answer = wrong.answers[before % len(wrong.answers)]
    chaos.left_running.append(asyncio.create_task(_ask(chaos, wrong, answer, strike)))


async def _ask(chaos: Chaos, wrong: Wrong, answer: Fault, strike: Strike) -> None:
    replay = _misbehaving(chaos).replay
    seed = FIRST_SEED + len(chaos.strikes)
    greedy = [question for question in chaos.asked if question.body["temperature"] == 0]
    question = chaos.rng.choice(greedy).with_seed(seed)  # which changes no answer, and by which the server knows it
    for _ in range(TRIES):
        replay.arm(seed, answer)
        call = await chaos.load.ask(question)
        struck_s = replay.struck_s.get(seed)
        if struck_s is not None:
            strike.at_s, strike.streams = struck_s, [call.request_id] if call.request_id else []
            chaos.endings.append(Ending(strike.kind, wrong, call, struck_s, replay.asked_times[seed]))
            return
    raise AssertionError(f"{MISBEHAVING} was not asked in {TRIES} tries")


async def _to_all(chaos: Chaos, wrong: Wrong) -> None:
    """Cut the wire to the server for a while, and ask meanwhile.

    What it does to single requests ends before: an answer that the cut swallows would be asked for again, elsewhere.
    """
    server = _misbehaving(chaos)
    if chaos.left_running:
        await asyncio.wait(chaos.left_running)
    strike = chaos.strike(kind_of(wrong), chaos.system.workers_of(MISBEHAVING)[0])
    strike.may_stay = True
    server.kill()
    asking = asyncio.create_task(chaos.load.ask(chaos.rng.choice(chaos.asked)))
    await asyncio.sleep(REFUSED_S)
    await server.start()
    strike.mended_s = time.monotonic()
    chaos.endings.append(Ending(strike.kind, wrong, await asking, strike.at_s))


for _wrong in WRONGS:
    FAULTS[kind_of(_wrong)] = partial(_to_one_request if _wrong.answers else _to_all, wrong=_wrong)
