"""Faults of servers in the field: each ends as an attempt that another pool resumes.

Faults of an answer's status are tested once, faults of a connection once per framing, and faults of an event with every
wire format.

The tokens before a fault are kept, none is repeated, and the server's other answers are unaffected. Only a fault of the
request itself is a refusal, which is not retried.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from benchmarks.ports import free_port
from engine.types import ResumePoint
from pool_worker import engines
from pool_worker.engines.base import EngineDiedError
from pool_worker.engines.formats import FORMATS
from pool_worker.engines.server_connection import SILENCED_STREAMS, ServerConnection, Taken
from pool_worker.settings import ServerEngineSettings
from protocol.generation import Grammar
from tests.conformance.driven_engine import MAX_MODEL_LEN, Driver, driving, request
from tests.conformance.replay import Replay, ReplayOf, running
from tests.conformance.replay_events import events_of
from tests.conformance.test_engines import server_settings
from tests.waiting import HANGS_S, HEALTHY_S

KIND_OF_FRAMING = {FORMATS[kind].framing: kind for kind in reversed(FORMATS)}
BODY = {"model": "replay", "prompt": [40, 41], "max_tokens": 20, "temperature": 0, "stop_token_ids": []}
SHORT_S = 1.0  # of silence; a loaded machine pauses for part of it


def settings(replay: Replay, tokenizer: str, **more: object) -> ServerEngineSettings:
    known = server_settings(replay, tokenizer, **{"max_model_len": MAX_MODEL_LEN, "ready_s": HANGS_S, **more})
    assert isinstance(known, ServerEngineSettings)
    return known


@contextlib.asynccontextmanager
async def paired(replay: Replay, tokenizer: str) -> AsyncIterator[tuple[Driver, Replay]]:
    replay.token_s = 0.001
    async with driving(settings(replay, tokenizer)) as driver:
        yield driver, replay


@pytest.fixture(params=list(FORMATS))
async def each(
    request: pytest.FixtureRequest, tokenizer: str, replay_of: ReplayOf
) -> AsyncIterator[tuple[Driver, Replay]]:
    """Every wire format."""
    async with paired(replay_of(request.param), tokenizer) as pair:
        yield pair


@pytest.fixture(params=list(KIND_OF_FRAMING.values()))
async def pair(
    request: pytest.FixtureRequest, tokenizer: str, replay_of: ReplayOf
) -> AsyncIterator[tuple[Driver, Replay]]:
    """A wire format of each framing."""
    async with paired(replay_of(request.param), tokenizer) as pair:
        yield pair


@pytest.fixture
async def sse(tokenizer: str, replay_of: ReplayOf) -> AsyncIterator[tuple[Driver, Replay]]:
    """One wire format, for answers that are judged by their status, before any framing."""
    async with paired(replay_of("vllm"), tokenizer) as pair:
        yield pair


def broken(events: list[str]) -> str:
    """Replace the sixth event by JSON of another kind."""
    return ("data: [1, 2]" if events[5].startswith("data:") else "[1, 2]") + "\n\n"


def failed(events: list[str]) -> str:
    error = '{"error": {"message": "CUDA out of memory"}}'
    return (f"data: {error}" if events[5].startswith("data:") else error) + "\n\n"


CUTS: dict[str, Callable[[list[str]], list[str]]] = {
    "cut in an event": lambda events: [*events[:5], events[5][: len(events[5]) // 2]],
    "malformed": lambda events: [*events[:5], events[5].replace('": ', '" ', 3), *events[5:]],
    "a list": lambda events: [*events[:5], broken(events), *events[5:]],
    "an endless event": lambda events: [*events[:5], events[5][:9] + "x" * 3_000_000],
}
TOLD = {"ids": ("ids", "output_ids", "token_ids", "tokens", "id"), "text": ("text", "response", "text_output")}


def nonsense(replay: Replay, events: list[str]) -> list[str]:
    """Replace the tokens or the text of the sixth event by something else."""
    event = re.sub(
        rf'"({"|".join(TOLD[FORMATS[replay.kind].answers_in])})": ("[^"]*"|\[[^]]*\]|\d+)', r'"\1": {"x": 1}', events[5]
    )
    return [*events[:5], event, *events[6:]]


async def check_earlier_tokens_kept(driver: Driver, replay: Replay, change: Callable[[list[str]], list[str]]) -> None:
    """Check that tokens before the fault are kept, the attempt fails, and other answers are unaffected."""
    whole = await driver.answer(request("whole"))
    driver.submit(request("beside", max_tokens=100))
    await driver.wait(lambda: bool(driver.answers["beside", 0].token_ids))
    replay.faults.append(replay.with_events(change))
    answer = await driver.answer(request("faulty"))
    assert answer.finish_reason == "error"
    assert answer.error
    assert answer.token_ids == whole.token_ids[:5]
    assert not driver.refusals
    (beside,) = await driver.end_of("beside")
    assert beside.finish_reason == "length"
    assert (await driver.answer(request("after"))).facts() == whole.facts()


@pytest.mark.parametrize("cut", CUTS)
async def test_a_faults_earlier_output_is_kept_and_the_attempt_fails(pair: tuple[Driver, Replay], cut: str) -> None:
    await check_earlier_tokens_kept(*pair, CUTS[cut])


async def test_a_nonsensical_event_fails_the_attempt(each: tuple[Driver, Replay]) -> None:
    driver, replay = each
    await check_earlier_tokens_kept(driver, replay, lambda events: nonsense(replay, events))


async def test_an_error_in_the_stream_fails_the_attempt(each: tuple[Driver, Replay]) -> None:
    driver, replay = each
    replay.faults.append(replay.with_events(lambda events: [*events[:5], failed(events)]))
    answer = await driver.answer(request())
    assert (answer.finish_reason, len(answer.token_ids)) == ("error", 5)
    assert "CUDA out of memory" in (answer.error or "")


async def test_a_stream_that_closes_without_an_end_fails(each: tuple[Driver, Replay]) -> None:
    """Except for Triton, whose answers have no other end: there, only a broken connection is detected."""
    driver, replay = each
    replay.faults.append(replay.with_events(lambda events: events[:5]))
    answer = await driver.answer(request())
    is_end = FORMATS[replay.kind].framing == "server-sent events to the close"
    assert answer.finish_reason == ("stop" if is_end else "error")


async def test_a_broken_connection_fails_the_attempt(each: tuple[Driver, Replay]) -> None:
    driver, replay = each
    replay.faults.append(replay.broken_off)
    cut = await driver.answer(request())
    assert (cut.finish_reason, len(cut.token_ids)) == ("error", 5)


async def test_a_stream_without_a_token_fails(pair: tuple[Driver, Replay]) -> None:
    driver, replay = pair
    replay.faults.append(lambda _: Response(b"", media_type="text/event-stream"))
    answer = await driver.answer(request())
    assert (answer.finish_reason, answer.token_ids) == ("error", [])


@pytest.mark.parametrize("status", [401, 403, 404, 410, 500, 502])
async def test_server_and_key_faults_are_not_the_clients(sse: tuple[Driver, Replay], status: int) -> None:
    driver, replay = sse
    replay.faults.append(lambda _: JSONResponse({"error": "x" * 10_000}, status))
    answer = await driver.answer(request())
    assert answer.finish_reason == "error"
    assert str(status) in (answer.error or "")
    assert len(answer.error or "") < 1000
    assert not driver.refusals


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_request_fault_is_refused_permanently(sse: tuple[Driver, Replay], status: int) -> None:
    driver, replay = sse
    replay.faults.append(lambda _: JSONResponse({"error": {"message": "context is too long"}}, status))
    answer = await driver.answer(request())
    assert "context is too long" in (answer.error or "")
    assert driver.refusals["r"].param
    assert (await driver.answer(request("after"))).finish_reason == "length"  # it counts against no server


@pytest.mark.parametrize(("status", "headers"), [(429, {"retry-after": "0.01"}), (503, {"retry-after": "0.01"})])
async def test_a_busy_server_is_retried_when_it_says(
    sse: tuple[Driver, Replay], status: int, headers: dict[str, str]
) -> None:
    driver, replay = sse
    replay.faults += [lambda _: JSONResponse({}, status, headers)] * 2
    assert (await driver.answer(request())).finish_reason == "length"
    assert len(replay.bodies) == 3


async def test_retries_share_a_budget(sse: tuple[Driver, Replay]) -> None:
    driver, replay = sse
    busy = 60
    replay.faults += [lambda _: JSONResponse({}, 429, {"retry-after": "0.01"})] * 200
    for number in range(busy):
        driver.submit(request(f"r{number}"))
    answers = await driver.end_of(*[f"r{number}" for number in range(busy)])
    assert {answer.finish_reason for answer in answers} == {"error"}
    assert len(replay.bodies) <= busy * 1.2 + 10 + 1


async def test_redirects_are_not_followed(sse: tuple[Driver, Replay]) -> None:
    driver, replay = sse
    replay.faults.append(lambda _: RedirectResponse("http://169.254.169.254/latest/meta-data"))
    answer = await driver.answer(request())
    assert answer.finish_reason == "error"
    assert "307" in (answer.error or "")


@pytest.mark.parametrize("kind", ["vllm", "llamacpp", "sglang", "lmdeploy", "trtllm", "tgi"])
async def test_a_premature_end_for_length_fails(kind: str, tokenizer: str, replay_of: ReplayOf) -> None:
    """Return whether the server counts the same tokens; one that answers in text counts its own."""
    async with paired(replay_of(kind), tokenizer) as (driver, replay):
        replay.faults.append(replay.with_events(lambda events: [*events[:6], _ended(kind, events)]))
        assert (await driver.answer(request())).finish_reason == "error"


def _ended(kind: str, events: list[str]) -> str:
    if kind in {"llamacpp", "tgi"}:
        return events[-1]
    return events[0].replace('"finish_reason": null', '"finish_reason": ' + _LENGTH.get(kind, '"length"'))


_LENGTH = {"sglang": '{"type": "length"}', "lmdeploy": '{"type": "length"}'}


async def test_a_silent_stream_fails_and_others_continue(tokenizer: str) -> None:
    with running(Replay("llamacpp", token_s=0.002)) as replay:
        async with driving(settings(replay, tokenizer, silence_s=SHORT_S)) as driver:

            async def silent() -> AsyncIterator[str]:
                yield ": hello\n\n"
                await asyncio.Event().wait()

            replay.faults.append(lambda _: StreamingResponse(silent(), media_type="text/event-stream"))
            driver.submit(request("silent"))
            await driver.wait_until(lambda: not replay.faults)
            keeping = asyncio.create_task(_keep_busy(driver))
            (answer,) = await driver.end_of("silent")
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping
            assert answer.finish_reason == "error"
            assert (await driver.answer(request("after"))).finish_reason == "length"


async def test_bytes_without_an_event_count_as_silence(tokenizer: str) -> None:
    """A server may send single bytes forever, which no timeout of the connection detects."""
    with running(Replay("llamacpp", token_s=0.002)) as replay:
        async with driving(settings(replay, tokenizer, silence_s=SHORT_S)) as driver:

            async def dribbling() -> AsyncIterator[str]:
                while True:
                    yield "d"
                    await asyncio.sleep(SHORT_S / 10)

            replay.faults.append(lambda _: StreamingResponse(dribbling(), media_type="text/event-stream"))
            driver.engine.submit(request("dribbling"))
            await driver.wait_until(lambda: not replay.faults)
            keeping = asyncio.create_task(_keep_busy(driver))
            (answer,) = await driver.end_of("dribbling")
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping
            assert answer.finish_reason == "error"
            assert "engine.silence_s" in (answer.error or "")


async def _keep_busy(driver: Driver) -> None:
    for number in range(1000):
        await driver.answer(request(f"busy{number}"))


def _stalled_after(events: int) -> Callable[[Request], StreamingResponse]:
    async def stalled(request: Request) -> AsyncIterator[str]:
        for event in events_of("vllm", request._json)[:events]:
            yield event
        while True:  # meaningless events do not keep a stream alive
            yield ": hello\n\n"
            yield 'data: {"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": null}]}\n\n'
            await asyncio.sleep(SHORT_S / 10)

    return lambda request: StreamingResponse(stalled(request), media_type="text/event-stream")


@pytest.mark.parametrize("is_ours", [True, False])
async def test_a_server_that_stops_making_tokens_is_lost(tokenizer: str, is_ours: bool) -> None:
    """Its health page answers, but its streams are silent: the worker leaves a self-hosted engine, not a hosted API."""
    lost: list[str] = []
    with running(Replay("vllm")) as replay:
        replay.faults += [_stalled_after(5)] * SILENCED_STREAMS
        connection = ServerConnection(settings(replay, tokenizer, silence_s=SHORT_S), lost.append, is_ours=is_ours)
        streams = (connection.stream("/v1/completions", BODY, "server-sent events", Heard()) for _ in replay.faults)
        ends = await asyncio.gather(*streams, return_exceptions=True)
        await connection.close()
    assert {str(end) for end in ends} == {f"the server was silent for {SHORT_S:g} s (engine.silence_s)"}
    assert lost == ([f"it is healthy but made no tokens for {SHORT_S:g} s (engine.silence_s)"] if is_ours else [])


class Heard:
    """An answer that consists of the tokens in its events."""

    has_begun = True

    def take(self, event: Mapping[str, Any]) -> Taken:
        return Taken.SOME if event["choices"][0]["token_ids"] else Taken.NOTHING

    def done(self) -> bool:
        return True


async def test_a_long_prefill_is_not_a_broken_server(tokenizer: str) -> None:
    with running(Replay("vllm")) as replay:
        async with driving(settings(replay, tokenizer, silence_s=SHORT_S)) as driver:
            replay.faults.append(_stalled_after(0))
            answer = await driver.answer(request("long"))
            assert "no token within 1 s (engine.silence_s; raise it" in (answer.error or "")
            assert (await driver.answer(request("after"))).finish_reason == "length"


async def test_an_unhealthy_server_is_lost(tokenizer: str) -> None:
    with running(Replay("vllm")) as replay:
        engine = engines.create(settings(replay, tokenizer, health_limit_s=HEALTHY_S))
        driver = Driver(engine, await engine.start())
        replay.is_healthy = False
        with pytest.raises(EngineDiedError, match="500"):
            await driver.run()
        await engine.stop()


async def test_a_server_that_never_starts_is_reported(tokenizer: str) -> None:
    replay = Replay("vllm", url=f"http://127.0.0.1:{free_port()}")
    engine = engines.create(settings(replay, tokenizer, ready_s=0.1))
    with pytest.raises(EngineDiedError, match="is not ready"):
        await engine.start()
    await engine.stop()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        pytest.param("https://127.0.0.1:{port}", r"^https://127\.0\.0\.1:\d+: .*is it http://", id="TLS"),
        pytest.param("http://nobody.invalid:{port}", r"^http://nobody\.invalid:\d+ is not ready", id="DNS"),
    ],
)
async def test_an_unreachable_server_is_reported(tokenizer: str, address: str, message: str) -> None:
    with running(Replay("vllm")) as replay:
        elsewhere = Replay("vllm", url=address.format(port=replay.url.rpartition(":")[2]))
        engine = engines.create(settings(elsewhere, tokenizer, ready_s=0.1))
        with pytest.raises(EngineDiedError, match=message):
            await engine.start()
        await engine.stop()


async def test_a_server_without_the_model_is_reported(tokenizer: str) -> None:
    with running(Replay("vllm")) as replay:
        engine = engines.create(settings(replay, tokenizer, model="another"))
        with pytest.raises(EngineDiedError, match="does not serve 'another'; it serves: replay"):
            await engine.start()
        await engine.stop()


async def test_a_folder_without_a_tokenizer_is_reported(tmp_path: Path) -> None:
    engine = engines.create(settings(Replay("vllm", url="http://127.0.0.1:9"), str(tmp_path)))
    with pytest.raises(EngineDiedError, match=r"engine\.tokenizer: cannot read .*tokenizer\.json"):
        await engine.start()
    await engine.stop()


async def test_canceling_ends_the_servers_work(pair: tuple[Driver, Replay]) -> None:
    driver, replay = pair
    replay.token_s = 0.05
    driver.submit(request("left", max_tokens=150))
    await driver.wait(lambda: bool(driver.answers["left", 0].token_ids))
    driver.engine.cancel("left")
    await driver.end_of("left")
    await driver.wait_until(lambda: replay.streams == 0)


async def test_a_partial_grammar_answer_is_left_to_others(pair: tuple[Driver, Replay]) -> None:
    """A server restarts a grammar in the middle of the answer, which would corrupt it."""
    driver, _ = pair
    grammar = Grammar("json_schema", '{"type": "object"}')
    resumed = request("resumed", grammar=grammar, resume=(ResumePoint(0, (60, 61), 2),))
    assert (await driver.answer(resumed)).finish_reason == "error"
    assert driver.refusals["resumed"].param == "response_format"
