"""Bytes written to the socket for a response."""

import asyncio
import logging
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.http.cycle import LINGER, Cycle

SERVER = (b"server", b"spillway")


class Socket(asyncio.Transport):
    """Records writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_read = True
        self.resets: list[bool] = []  # whether closing sends a reset

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"socket": self}.get(name, default)

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        assert (level, option) == (SOL_SOCKET, SO_LINGER)
        self.resets.append(value == LINGER.pack(1, 0))

    def write(self, data: Any) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def close(self) -> None:
        self.written += b"<closed>"


@pytest.fixture
def socket() -> Socket:
    return Socket()


def cycle_on(socket: Socket, *, method: str = "POST", keep_alive: bool = True, version: str = "1.1") -> Cycle:
    log = logging.getLogger(__name__)
    return Cycle(
        scope={"type": "http", "method": method, "http_version": version},  # type: ignore[typeddict-item]
        transport=socket,
        flow=FlowControl(socket),
        logger=log,
        access_logger=log,
        access_log=False,
        default_headers=[SERVER],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=keep_alive,
        on_response=lambda: None,
    )


def head(status: int = 200, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(content: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def test_an_answer_of_known_length(socket: Socket) -> None:
    cycle = cycle_on(socket)
    await cycle.send(head(200, (b"content-length", b"2"), (b"x-a", b"1")))
    await cycle.send(body(b"ok"))
    assert socket.written == b"HTTP/1.1 200 OK\r\nserver: spillway\r\ncontent-length: 2\r\nx-a: 1\r\n\r\nok"


async def test_an_answer_of_unknown_length_is_chunked(socket: Socket) -> None:
    cycle = cycle_on(socket)
    await cycle.send(head())
    await cycle.send(body(b"ok", more=True))
    await cycle.send(body(b""))
    assert (
        socket.written
        == b"HTTP/1.1 200 OK\r\nserver: spillway\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    )


async def test_an_http_1_0_answer_ends_with_the_connection(socket: Socket) -> None:
    cycle = cycle_on(socket, keep_alive=False, version="1.0")
    await cycle.send(head())
    assert socket.resets == [True]
    await cycle.send(body(b"ok", more=True))
    await cycle.send(body(b"!"))
    assert socket.resets == [True, False]
    assert socket.written == b"HTTP/1.1 200 OK\r\nserver: spillway\r\nconnection: close\r\n\r\nok!<closed>"


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("POST", 204), ("POST", 304)])
async def test_bodyless_statuses_have_no_content_length(socket: Socket, method: str, status: int) -> None:
    cycle = cycle_on(socket, method=method)
    await cycle.send(head(status))
    await cycle.send(body(b""))
    assert b"chunked" not in socket.written
    assert socket.written.endswith(b"spillway\r\n\r\n")


@pytest.mark.parametrize("headers", [(), ((b"connection", b"close"),)])
async def test_connection_close_is_sent_once(socket: Socket, headers: tuple[tuple[bytes, bytes], ...]) -> None:
    cycle = cycle_on(socket, keep_alive=bool(headers))
    await cycle.send(head(200, (b"content-length", b"0"), *headers))
    await cycle.send(body(b""))
    assert socket.written.count(b"connection: close") == 1
    assert socket.written.endswith(b"<closed>")


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb", b"a\0b"])
async def test_header_injection_is_refused(socket: Socket, value: bytes) -> None:
    with pytest.raises(RuntimeError, match="control character"):
        await cycle_on(socket).send(head(200, (b"x-a", value)))
    assert not socket.written


async def test_a_disconnect_is_reported_once(socket: Socket) -> None:
    told: list[str] = []
    cycle = cycle_on(socket)
    cycle.flow.pause_reading()
    cycle.call_on_disconnect(lambda: told.append("gone"))
    assert socket.is_read  # otherwise a disconnect would go unnoticed
    cycle.notify_disconnect()
    cycle.notify_disconnect()
    assert told == ["gone"]
    cycle.call_on_disconnect(lambda: told.append("late"))
    assert told == ["gone", "late"]


async def test_a_disconnect_after_the_answer_is_not_reported(socket: Socket) -> None:
    cycle = cycle_on(socket)
    cycle.call_on_disconnect(lambda: pytest.fail("nobody asks any more"))
    cycle.call_on_disconnect(None)
    cycle.notify_disconnect()
