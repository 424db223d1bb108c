"""Servers that speak the wire formats as their makers publish them (``replay_events``).

Not the real servers: those are asked by ``real_servers``. ``faults`` holds what the next requests do instead.
"""

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from pool_worker.engines.formats import FORMATS
from pool_worker.engines.formats.tokenizer_sample import TOKENIZER_PAGES
from tests.conformance.replay_events import EVENTS
from tests.conformance.vllm_replay import VllmReplay

CONTEXT: Final = 200
SLOTS: Final = 4
TRITON_INPUTS: Final = (
    "text_input",
    "max_tokens",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "random_seed",
    "seed",
)

Fault = Callable[[Request], Response]


# What servers tell of themselves, by where they are asked for it.
FACTS: Final[dict[str, dict[str, Any]]] = {
    "/props": {"default_generation_settings": {"n_ctx": CONTEXT}, "total_slots": SLOTS, "model_alias": "replay"},
    "/v1/models": {"object": "list", "data": [{"id": "replay", "object": "model", "max_model_len": CONTEXT}]},
    "/get_model_info": {"model_path": "replay", "is_generation": True},
    "/info": {"model_id": "replay", "max_total_tokens": CONTEXT, "max_concurrent_requests": SLOTS},
    "/api/tags": {"models": [{"name": "replay:latest", "model": "replay:latest", "size": 1}]},
    "/v2/models/{model}": {
        "name": "replay",
        "versions": ["1"],
        "platform": "python",
        "inputs": [{"name": name, "datatype": "BYTES", "shape": [1]} for name in TRITON_INPUTS],
        "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1]}],
    },
}


@dataclass
class Replay:
    """One server: its address, what it was asked, and the faults of its next requests."""

    kind: str
    faults: deque[Fault] = field(default_factory=deque)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    is_healthy: bool = True
    facts: Any = None  # what it tells of itself; None: as in FACTS, and a status: that instead
    sample: Sequence[int] = (40, 41, 42)  # how its tokenizer reads any text
    token_s: float = 0.0
    streams: int = 0  # that run
    url: str = ""

    def app(self) -> FastAPI:
        app = FastAPI()

        async def health() -> Response:
            return Response(status_code=200 if self.is_healthy else 500)

        async def generate(request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            if (fault := self.fault_for(body)) is not None:
                return fault(request)
            return StreamingResponse(self.answer(body), media_type="text/event-stream")

        async def told() -> Response:
            facts = FACTS.get(wire.facts_path, {}) if self.facts is None else self.facts
            return Response(status_code=facts) if isinstance(facts, int) else JSONResponse(facts)

        async def tokenize(request: Request) -> Response:
            assert await request.json()
            page = TOKENIZER_PAGES[self.kind]
            return JSONResponse(
                [{"id": id_} for id_ in self.sample] if page.field is None else {page.field: self.sample}
            )

        wire = FORMATS[self.kind]
        if self.kind in TOKENIZER_PAGES:
            app.post(TOKENIZER_PAGES[self.kind].path)(tokenize)
        if wire.health_path != wire.facts_path:
            app.get(wire.health_path)(health)
        app.get(wire.facts_path.format(model="replay"))(told)
        app.post(wire.generate_path.format(model="replay"))(generate)
        return app

    def fault_for(self, body: Mapping[str, Any]) -> Fault | None:
        """Return what to do instead of an answer to this request, if anything."""
        del body
        return self.faults.popleft() if self.faults else None

    def answer(self, body: Mapping[str, Any]) -> AsyncIterator[str]:
        """The events of an undisturbed answer, in their time."""
        return self._paced(EVENTS[self.kind](body))

    async def _paced(self, events: Sequence[str]) -> AsyncIterator[str]:
        self.streams += 1
        try:
            for event in events:
                await asyncio.sleep(self.token_s)
                yield event
        finally:
            self.streams -= 1


class App(Protocol):
    """Something that listens."""

    url: str

    def app(self) -> FastAPI: ...


AnyApp = TypeVar("AnyApp", bound=App)


@contextlib.contextmanager
def running(replay: AnyApp) -> Iterator[AnyApp]:
    """Let it listen on a free port of this machine, in a thread of its own."""
    config = uvicorn.Config(
        replay.app(), port=0, log_config=None, log_level="critical", access_log=False, lifespan="off"
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    replay.url = f"http://127.0.0.1:{listener.getsockname()[1]}"  # connections wait until it accepts them
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield replay
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
        listener.close()


AnyReplay = Replay | VllmReplay


@contextlib.contextmanager
def running_on_demand() -> Iterator[Callable[[str], Any]]:
    """Give one server of each kind that is asked for, as new, and end them all together."""
    with contextlib.ExitStack() as stack:
        replays: dict[str, AnyReplay] = {}

        def of(kind: str) -> AnyReplay:
            if kind not in replays:
                is_here = kind == VllmReplay.kind
                replays[kind] = (
                    stack.enter_context(VllmReplay().installed())
                    if is_here
                    else stack.enter_context(running(Replay(kind)))
                )
            replay = replays[kind]
            replay.faults.clear()
            replay.bodies.clear()
            replay.is_healthy = True
            if isinstance(replay, Replay):
                replay.facts, replay.sample = None, Replay.sample
            return replay

        yield of
