"""Bytes at the socket, write by write."""

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from gateway.api.calls import ChatCall
from gateway.dispatch.lifecycle import OpenRequest, State
from gateway.dispatch.stream import AnswerStream
from gateway.errors import Failure
from gateway.http.asgi import ABORT_KEY
from gateway.http.exchange import ClientExchange
from gateway.http.reply import StreamWriter
from gateway.settings import TimeoutSettings
from protocol.errors import ErrorCode
from protocol.job import Frame
from tests.unit.gateway.dispatch.opened_requests import Closing, accepted, failed, finished, open_request, tokens
from tests.waiting import HANGS_S

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}


class Socket:
    """Receives ASGI messages; can stop reading."""

    def __init__(self) -> None:
        self.heads: list[MutableMapping[str, Any]] = []
        self.writes: list[bytes] = []
        self.ended = False
        self.aborted = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.heads.append(message)
            return
        self.writes.append(message["body"])
        self.ended = not message["more_body"]

    async def receive(self) -> MutableMapping[str, Any]:
        raise AssertionError("nothing is read here")


def writing(
    request: OpenRequest, n: int = 1, grace_s: float = 30.0, **fields: Any
) -> tuple[Socket, asyncio.Task[None]]:
    socket = Socket()
    scope = {"method": "POST", "path": "/v1/completions", "headers": [], ABORT_KEY: socket.aborted.set}
    timeouts = TimeoutSettings(headers_grace_s=grace_s)
    exchange = ClientExchange(scope, socket.receive, socket.send, timeouts)
    call = ChatCall(json.dumps({**BODY, "n": n, **fields}).encode())
    writer = StreamWriter(exchange, call, AnswerStream([call], [request], Closing()), timeouts)
    return socket, asyncio.create_task(writer.write())


async def step(request: OpenRequest, *frames: Frame) -> None:
    """Run an engine step: deliver all frames in one callback, then let other tasks run."""
    for frame in frames:
        request.on_frame("w", frame, 1.0)
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_write_per_engine_step() -> None:
    request, _ = open_request(n=3)
    socket, task = writing(request, n=3)
    await step(request, accepted())
    assert socket.heads == []  # it can still be refused
    await step(request, *(tokens(1 + i, "a", index=i) for i in range(3)))
    assert (socket.heads[0]["status"], len(socket.writes)) == (200, 1)
    await step(request, *(tokens(4 + i, "b", index=i, finish_reason="stop") for i in range(3)))
    assert len(socket.writes) == 2
    await step(request, finished(7))
    await task
    assert (socket.writes[2:], socket.ended) == ([b"data: [DONE]\n\n"], True)
    assert b"".join(socket.writes).count(b'"content":"a"') == 3


async def test_comments_while_queued() -> None:
    request, _ = open_request(queued_comment_s=10.0)
    socket, task = writing(request, grace_s=0.001)
    async with asyncio.timeout(HANGS_S):
        while not socket.writes:
            await asyncio.sleep(0.001)
    request.on_tick(10.0, connected=True)
    await step(request)
    assert socket.writes == [b": queued position=1\n\n"] * 2
    assert (b"x-spillway-queue-position", b"1") in socket.heads[0]["headers"]
    request.cancel(11.0)
    await task
    assert not socket.ended


async def test_a_refusal_before_the_first_token_has_a_status() -> None:
    request, _ = open_request()
    socket, task = writing(request)
    await step(request, accepted(), failed(1, code="context_length_exceeded", retryable=False))
    await task
    assert (socket.heads[0]["status"], socket.ended) == (400, True)
    assert json.loads(socket.writes[0])["error"]["code"] == "context_length_exceeded"


async def test_a_failure_in_the_middle_has_no_clean_end() -> None:
    request, _ = open_request()
    socket, task = writing(request)
    await step(request, accepted(), tokens(1), failed(2, code="engine_error", retryable=False))
    await task
    assert not socket.ended
    assert b'data: {"error":' in socket.writes[-1]
    assert b"[DONE]" not in b"".join(socket.writes)


async def test_usage_comes_before_the_end() -> None:
    request, _ = open_request()
    socket, task = writing(request, stream_options={"include_usage": True})
    await step(request, accepted(), tokens(1, finish_reason="stop"), finished(2))
    await task
    events = b"".join(socket.writes).split(b"\n\n")
    assert events[-2] == b"data: [DONE]"
    assert json.loads(events[-3].removeprefix(b"data: "))["usage"]["completion_tokens"] == 1


async def test_a_client_that_does_not_read_is_disconnected() -> None:
    request, _ = open_request()
    socket, task = writing(request)
    await step(request, accepted(), tokens(1))
    socket.reads.clear()
    await step(request, tokens(2))
    request.on_frame("w", tokens(3), 1.0)
    request.give_up_unread(1.0)
    await task
    assert socket.aborted.is_set()
    assert request.failure is not None
    assert request.failure.code is ErrorCode.SLOW_CLIENT


async def test_a_failed_writer_leaves_a_request_that_can_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's time limit ends with the writer. Rescheduling it in `cancel` once raised and lost the record."""
    request, _ = open_request()
    _, task = writing(request)
    await step(request, accepted())
    monkeypatch.setattr("gateway.api.events.ChatChunks.of", None)
    await step(request, tokens(1))
    with pytest.raises(TypeError):
        await task
    request.cancel(2.0)
    assert request.state is State.STOPPING


async def test_a_failure_before_the_intent_is_stored_has_a_status() -> None:
    """A hanging queue server delays the head for longer than some deadlines."""
    request, _ = open_request()
    request.row = asyncio.get_running_loop().create_future()
    socket, task = writing(request)
    await step(request, accepted(), tokens(1, "a"))
    assert socket.heads == []  # nothing is sent yet
    request.fail(Failure(ErrorCode.DEADLINE_EXCEEDED, "too late"), 2.0)
    await task
    assert socket.heads[0]["status"] == 504
    assert json.loads(socket.writes[0])["error"]["code"] == "deadline_exceeded"
    assert socket.ended
