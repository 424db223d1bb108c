"""Replacement for uvicorn's request-response cycle, which took a tenth of the time of a small answer."""

import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from gateway.http.asgi import Message

LINGER: Final = struct.Struct("ii")  # SO_LINGER: on or off, seconds; 0 s resets the connection
NO_BODY: Final = {HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED}


class Cycle(RequestResponseCycle):
    """One request and its response."""

    _on_disconnect: Callable[[], object] | None = None
    _ends_by_close = False  # for HTTP/1.0 clients, without chunked encoding; an aborted response is reset

    def whole_body(self) -> bytes | None:
        """Take the complete body, so that ``receive`` does not return it; None if it has not fully arrived."""
        if self.more_body or self.disconnected or self.waiting_for_100_continue:
            return None
        self.message_event.clear()
        body, self.body = bytes(self.body), bytearray()
        return body

    def call_on_disconnect(self, callback: Callable[[], object] | None) -> None:
        """Call ``callback`` once if the client disconnects before the response is complete; None: unset.

        Use after the body is received: nothing else would notice the disconnect then.
        """
        self._on_disconnect = callback
        if callback is None:
            return
        self.flow.resume_reading()
        if self.disconnected:
            self.notify_disconnect()

    def notify_disconnect(self) -> None:
        """Mark the client as disconnected, and call back."""
        self.disconnected = True
        self.message_event.set()
        callback, self._on_disconnect = self._on_disconnect, None
        if callback is not None:
            callback()

    def send(self, message: Message) -> Awaitable[None]:  # type: ignore[override]  # equivalent for callers that await it
        """Send an ASGI message of the response."""
        if message["type"] == "http.response.start" and not self.response_started:
            return self._send_head(message["status"], message.get("headers", ()))
        if self._ends_by_close and message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))  # uvicorn counts it down
            if not message.get("more_body", False):
                self._reset_at_close(is_on=False)
        return super().send(message)  # type: ignore[arg-type]  # ASGI's own types

    async def _send_head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        self.response_started, self.waiting_for_100_continue = True, False
        lines, says_close = [STATUS_LINE[status][:-2]], False
        for name, value in (*self.default_headers, *headers):  # ASGI requires lower-case names
            lines.append(name + b": " + value)
            if name == b"content-length":
                self.expected_content_length, self.chunked_encoding = int(value), False
            elif name == b"connection" and b"close" in value.lower():
                self.keep_alive, says_close = False, True
        if self.chunked_encoding is None and self.scope["method"] != "HEAD" and status not in NO_BODY:
            self.chunked_encoding = self.scope["http_version"] == "1.1"
            if self.chunked_encoding:
                lines.append(b"transfer-encoding: chunked")
            else:
                self._ends_by_close = True
                self._reset_at_close(is_on=True)
        if not self.keep_alive and not says_close:
            lines.append(b"connection: close")
        head = b"\r\n".join(lines)
        if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1 or b"\0" in head:
            raise RuntimeError("a response header contains a control character")
        self.transport.write(head + b"\r\n\r\n")

    def _reset_at_close(self, *, is_on: bool) -> None:
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER.pack(is_on, 0))
