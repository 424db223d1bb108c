"""Clients: each sends one request, reads the answer as it arrives, and may disconnect before its end."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from gateway.http.exchange import ClientExchange
from gateway.settings import TimeoutSettings
from tests.simulation.engine import text_of, token_at
from tests.simulation.parts import Gateway, body_of
from tests.simulation.world import World

CONNECT_AGAIN_S = 0.25
CONNECT_LIMIT_S = 60.0


@dataclass(frozen=True)
class Question:
    """A request with its time and its client."""

    number: int  # the prompt's first token, which identifies the request everywhere
    at_s: float
    gateway: int
    key: str
    streams: bool
    length: int  # tokens of the complete answer
    max_tokens: int
    choices: int
    prompt_tokens: int
    deadline_ms: int | None
    leaves_after_s: float | None
    is_batch: bool

    @property
    def answer_tokens(self) -> int:
        return min(self.length, self.max_tokens)

    def text(self, index: int) -> str:
        return "".join([text_of(token_at(self.number, index, place)) for place in range(self.answer_tokens)])

    def body(self) -> bytes:
        fields: dict[str, Any] = {
            "prompt": [self.number, self.length, *[1] * (self.prompt_tokens - 2)],
            "max_tokens": self.max_tokens,
            "n": self.choices,
        }
        if self.streams:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.is_batch:
            fields["service_tier"] = "flex"
        return body_of(**fields)


@dataclass(eq=False)
class Caller:
    """One question and its outcome."""

    world: World
    question: Question
    asked_s: float | None = None  # on the loop's clock
    ended_s: float | None = None
    status: int = 0  # 0: no head yet
    request_id: str | None = None
    body: bytes = b""
    is_complete: bool = False  # the server ended the response
    was_cut_off: bool = False  # its gateway died
    was_broken_off: bool = False  # its gateway ended the connection
    has_left: bool = False
    _gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, gateways: list[Gateway]) -> None:
        loop = self.world.loop
        await asyncio.sleep(max(0.0, self.question.at_s - self.world.now_s))
        gateway = await self._find(gateways)
        if gateway is None:
            self.ended_s = loop.now_s
            return
        self.asked_s = loop.now_s
        self.world.log("ask", self.question.number, gateway.id)
        gateway.callers[self] = None
        assert gateway.process is not None
        gateway.process.run(self._serve(gateway))
        leaves = self.question.leaves_after_s
        try:
            async with asyncio.timeout(leaves):
                await self._gone.wait()
        except TimeoutError:
            self.has_left = True
            self.world.log("leave", self.question.number)
            self._gone.set()
        gateway.callers.pop(self, None)
        self.ended_s = loop.now_s
        self.world.log("answered", self.question.number, self.status, self.is_complete, len(self.body))

    async def _find(self, gateways: list[Gateway]) -> Gateway | None:
        """Return the chosen gateway, or another one that listens, as a load balancer does."""
        for attempt in range(int(CONNECT_LIMIT_S / CONNECT_AGAIN_S)):
            gateway = gateways[(self.question.gateway + attempt) % len(gateways)]
            if gateway.application is not None:
                return gateway
            await asyncio.sleep(CONNECT_AGAIN_S)
        return None

    def cut_off(self) -> None:
        self.was_cut_off = True
        self._gone.set()

    # --- within the gateway -------------------------------------------------------------------------------------------

    async def _serve(self, gateway: Gateway) -> None:
        length = str(len(self.question.body())).encode()
        headers = [(b"authorization", f"Bearer {self.question.key}".encode()), (b"content-length", length)]
        if self.question.deadline_ms is not None:
            headers.append((b"x-spillway-deadline-ms", str(self.question.deadline_ms).encode()))
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": headers,
            "spillway.abort": self._break_off,
        }
        await gateway.application(ClientExchange(scope, self._receive, self._send, TimeoutSettings()))
        if not self._gone.is_set():
            self._break_off()

    _body_sent = False

    async def _receive(self) -> dict[str, Any]:
        if not self._body_sent:
            self._body_sent = True
            return {"type": "http.request", "body": self.question.body(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self._gone.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.request_id = dict(message["headers"]).get(b"x-request-id", b"").decode()
            self.world.log("head", self.question.number, self.status)
        else:
            self.body += message["body"]
            if not message.get("more_body"):
                self.is_complete = True
                self._gone.set()

    def _break_off(self) -> None:
        self.was_broken_off = True
        self._gone.set()

    # --- the response -------------------------------------------------------------------------------------------------

    def events(self) -> list[Any]:
        """The received events of a stream."""
        found = [event[6:] for event in self.body.split(b"\n\n") if event.startswith(b"data: ")]
        return [event if event == b"[DONE]" else json.loads(event) for event in found]

    def error_code(self) -> str | None:
        """The code of the error that the client received; None: none."""
        if self.status >= 400:
            return str(json.loads(self.body)["error"]["code"]) if self.is_complete else None
        if self.status == 200 and self.question.streams:
            for event in self.events():
                if event != b"[DONE]" and "error" in event:
                    return str(event["error"]["code"])
        return None

    def texts(self) -> list[str]:
        """The received text of each choice."""
        texts = [""] * self.question.choices
        if self.status != 200:
            return texts
        if self.question.streams:
            for event in self.events():
                for choice in [] if event == b"[DONE]" else event.get("choices", ()):
                    texts[choice["index"]] += choice["text"]
        elif self.is_complete:
            for choice in json.loads(self.body)["choices"]:
                texts[choice["index"]] += choice["text"]
        return texts
