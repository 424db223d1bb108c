"""Answers of servers that imitate OpenAI's API: accepted if valid, otherwise reported as a named fault."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pool_worker.engines.chat import ChatRequest
from pool_worker.engines.server_connection import BUSY_TRIES
from pool_worker.settings import OpenAIChatSettings
from protocol.generation import SamplingParams
from protocol.job import Chat, Turn
from tests.conformance.test_chat_engines import Answer, Driver, driving_chat
from tests.conformance.upstream_rig import UpstreamRig, rigged, script

HEARD = "Hello"
SHORT_S = 1.0  # of silence; a loaded machine pauses for part of it
NEVER_ENDING = 100  # events
LIMITED = {"error": {"type": "rate_limit_error", "message": "slowly"}}


def data(event: Any) -> str:
    return f"data: {json.dumps(event)}\n\n"


def delta(text: str | None = None, end: str | None = None, **more: Any) -> dict[str, Any]:
    content = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": content, "finish_reason": end}], **more}


SAID, STOP, DONE = data(delta(HEARD)), data(delta(end="stop")), "data: [DONE]\n\n"
WHOLE = {"choices": [{"message": {"role": "assistant", "content": HEARD}, "finish_reason": "stop"}]}


@pytest.fixture
async def rig() -> AsyncIterator[UpstreamRig]:
    async with rigged() as rig:
        yield rig


@pytest.fixture
async def driver(rig: UpstreamRig) -> AsyncIterator[Driver]:
    async with driving(rig) as driver:
        yield driver


@contextlib.asynccontextmanager
async def driving(rig: UpstreamRig, **more: Any) -> AsyncIterator[Driver]:
    known = {"kind": "openai_chat", "profile": "openai", "url": rig.url, "model": "rigged"}
    async with driving_chat(OpenAIChatSettings(**{**known, **more})) as driver:
        yield driver


async def ask(driver: Driver, prompt: str) -> Answer:
    chat = Chat((Turn("user", prompt),), is_limited=True)
    driver.engine.submit(ChatRequest("r", chat, SamplingParams(max_tokens=32), prompt_tokens=5))
    await driver.wait(lambda: "r" in driver.refusals or driver.answers["r", 0].finish_reason is not None)
    return driver.answers["r", 0]


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param((SAID, STOP, DONE), id="as documented"),
        pytest.param((SAID, STOP), id="closed after its end"),
        pytest.param((SAID, DONE), id="done without a reason"),
        pytest.param((SAID, data(delta(end="")), DONE), id="an empty reason"),
        pytest.param((SAID, data(delta(end="STOP")), DONE), id="in capitals"),
        pytest.param((SAID, data(delta(end="end_turn")), DONE), id="a synonym"),
        pytest.param((SAID, data(delta(end="whatever")), DONE), id="an unknown reason"),
        pytest.param((data(delta(HEARD, error=None)), STOP, DONE), id="no error"),
        pytest.param((data({"object": "ping"}), SAID, data({"usage": None}), STOP, DONE), id="events without choices"),
        pytest.param(("\ufeff" + SAID, STOP, DONE), id="a byte order mark"),
        pytest.param(((SAID + STOP + DONE).replace("\n", "\r\n"),), id="CRLF"),
        pytest.param(((SAID + STOP + DONE).replace("\n", "\r"),), id="CR"),
        pytest.param(tuple((SAID + STOP + DONE).replace("\n", "\r\n")), id="CRLF, a byte at a time"),
        pytest.param((SAID.replace('"delta"', '\ndata: "delta"'), STOP, DONE), id="several lines of data"),
        pytest.param((": hello\nid: 7\nretry: 3\nx: y\n" + SAID, STOP, DONE), id="other fields"),
        pytest.param(((SAID + STOP + DONE).replace("\n\n", "\n"),), id="no blank lines"),
        pytest.param((json.dumps(WHOLE),), id="JSON instead of a stream"),
        pytest.param((json.dumps(WHOLE, indent=2),), id="JSON over many lines"),
        pytest.param((json.dumps(delta(HEARD)) + "\n", json.dumps(delta(end="stop")) + "\n"), id="JSON lines"),
    ],
)
async def test_unusual_answers_are_accepted(driver: Driver, rig: UpstreamRig, pieces: tuple[str, ...]) -> None:
    answer = await ask(driver, prompt := script(*pieces))
    assert (answer.text(), answer.finish_reason, answer.error) == (HEARD, "stop", None)
    assert rig.bought[prompt] == 1


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        pytest.param((SAID,), "has no end", id="cut"),
        pytest.param((DONE,), "has no end", id="nothing"),
        pytest.param(("<html>Log in</html>",), "begins with '<html>Log in</html>'", id="a page"),
        pytest.param((SAID, data(delta(end="error"))), "ended the answer with 'error'", id="a failure for an end"),
        pytest.param((SAID, data({"error": "out of memory"})), "out of memory", id="an error"),
        pytest.param((SAID, "event: error\n" + data({"message": "broken"})), "broken", id="an error event"),
        pytest.param((SAID, "event: error\ndata: broken\n\n"), "broken", id="an error event without JSON"),
        pytest.param((SAID, 'error: {"message": "slot lost"}\n\n'), "slot lost", id="an error line"),
        pytest.param((SAID, data({"object": "error", "message": "dead"})), "dead", id="an error for an object"),
        pytest.param((data({"error": {"code": 401, "message": "no key"}}),), "401: no key", id="a code"),
        pytest.param((SAID, data({"error": {"code": 400, "message": "late"}})), "late", id="refused once begun"),
    ],
)
async def test_an_invalid_answer_is_reported(driver: Driver, pieces: tuple[str, ...], error: str) -> None:
    answer = await ask(driver, script(*pieces))
    assert answer.finish_reason == "error"
    assert error in (answer.error or "")


@pytest.mark.parametrize(
    "reported",
    [
        {"error": {"code": 400, "message": "too long"}},
        {"error": {"code": "400", "message": "too long"}},
        {"error": {"type": "invalid_request_error", "message": "too long"}},
        {"error": {"type": "BadRequestError", "message": "too long"}},
        {"error": {"status": "INVALID_ARGUMENT", "message": "too long"}},
        {"error": {"code": "context_length_exceeded", "message": "too long"}},
        {"error": "too long", "error_type": "validation"},
        {"object": "error", "code": 400, "message": "too long"},
    ],
)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_an_error_code_counts_like_a_status(
    driver: Driver, rig: UpstreamRig, reported: dict[str, Any], is_stream: bool
) -> None:
    prompt = script(data(reported) if is_stream else json.dumps(reported))
    await ask(driver, prompt)
    assert "too long" in (driver.refusals["r"].error or "")
    assert rig.bought[prompt] == 1


@pytest.mark.parametrize(
    ("prompt", "wait_s", "times"),
    [
        pytest.param(script(data(LIMITED)), None, 1, id="an event"),
        pytest.param(script(json.dumps(LIMITED), status=429), None, 1, id="a status"),
        pytest.param(script(status=503, headers=[("retry-after", "20")]), 20, 1, id="a status with a wait"),
        pytest.param(script(data(LIMITED), headers=[("retry-after", "20")]), 20, 1, id="an event with a wait"),
        pytest.param(script(status=429, headers=[("retry-after-ms", "10")]), 0.01, BUSY_TRIES, id="a short wait"),
    ],
)
async def test_a_busy_server_is_not_retried_early(
    driver: Driver, rig: UpstreamRig, prompt: str, wait_s: float | None, times: int
) -> None:
    answer = await ask(driver, prompt)
    assert (answer.finish_reason, driver.busy) == ("error", {"r": wait_s})
    assert "the server is busy: it answered" in (answer.error or "")
    assert rig.bought[prompt] == times


@pytest.mark.parametrize("noise", [": ping\n\n", data(delta("")), data({"choices": []}), "data: {}\n\n"])
@pytest.mark.parametrize("begun", [(), (SAID,)], ids=["before it begins", "in an answer"])
async def test_noise_does_not_keep_a_stream_alive(rig: UpstreamRig, begun: tuple[str, ...], noise: str) -> None:
    async with driving(rig, silence_s=SHORT_S) as driver:
        answer = await ask(driver, script(*begun, *[noise] * NEVER_ENDING, pause_s=SHORT_S / 20))
        assert "engine.silence_s" in (answer.error or "")


async def test_any_content_keeps_a_stream_alive(rig: UpstreamRig) -> None:
    called = {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}
    parts = [delta("a"), delta(reasoning_content="b"), delta(tool_calls=[called])]
    async with driving(rig, silence_s=SHORT_S) as driver:
        answer = await ask(driver, script(*map(data, parts * 4), STOP, DONE, pause_s=SHORT_S / 4))
        assert (answer.finish_reason, answer.error) == ("stop", None)
