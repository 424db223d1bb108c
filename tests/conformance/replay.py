"""A server that replays other servers' answers. An API is a class that defines requests and answers by path.

``real_servers`` runs the real servers. ``faults`` replaces the answers of the next requests.
"""

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol, TypeVar, overload

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pool_worker.engines.formats import FORMATS
from pool_worker.engines.formats.tokenizer_sample import TOKENIZER_PAGES
from tests.conformance.replay_events import events_of
from tests.conformance.vllm_replay import VllmReplay

CONTEXT: Final = 200
SLOTS: Final = 4
TRITON_INPUTS: Final = (  # every parameter of a request is an input of the model
    "text_input max_tokens stream temperature top_p top_k presence_penalty frequency_penalty repetition_penalty"
    " random_seed seed"
)

# Facts that servers report, by path.
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
        "inputs": [{"name": name, "datatype": "BYTES", "shape": [1]} for name in TRITON_INPUTS.split()],
        "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1]}],
    },
}

Fault = Callable[[Request], Response]
Handlers = dict[str, Callable[[Request], Any]]  # by path


@dataclass
class Replay:
    """One server: its address, its requests, and the faults of its next requests.

    This one speaks the wire format ``kind`` (``replay_events``); subclasses override what differs.
    """

    kind: str = ""
    media_type: ClassVar[str] = "text/event-stream"
    faults: deque[Fault] = field(default_factory=deque)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    is_healthy: bool = True
    facts: Any = None  # facts to report; None: FACTS; a status: that instead
    sample: Sequence[int] = (40, 41, 42)  # its tokenizer's ids for any text
    check_status: int = 400  # for an empty request
    token_s: float = 0.0
    is_another: bool = False  # another model: streams of this one break off
    streams: int = 0  # running streams
    first_streams: int = 0  # of these, streams begun before the model changed
    url: str = ""

    def forget(self) -> None:
        """Reset everything except the address."""
        stays = {"url", "streams", "first_streams"}
        vars(self).update({name: value for name, value in vars(type(self)(self.kind)).items() if name not in stays})

    def pages(self) -> Handlers:
        """Return the answers to GET."""
        wire = FORMATS[self.kind]
        return {wire.health_path: self.health, wire.facts_path.format(model="replay"): self.tell}

    def calls(self) -> Handlers:
        """Return the answers to POST."""
        asked: Handlers = {FORMATS[self.kind].generate_path.format(model="replay"): self.generate}
        return asked | ({TOKENIZER_PAGES[self.kind].path: self.tokenize} if self.kind in TOKENIZER_PAGES else {})

    def received(self, request: Request) -> None:
        """Check the parts of a request outside its body."""

    def events(self, body: Mapping[str, Any]) -> Sequence[str | bytes]:
        """Return the stream that answers a body."""
        return events_of(self.kind, body)

    def fault_for(self, body: Mapping[str, Any]) -> Fault | None:
        """Return the fault that replaces this request's answer, if any."""
        del body
        return self.faults.popleft() if self.faults else None

    def answer(self, body: Mapping[str, Any]) -> AsyncIterator[str | bytes]:
        """Yield the events of an undisturbed answer, with their delays."""
        return self._paced(self.events(body))

    def with_events(self, change: Callable[[list[Any]], Sequence[Any]]) -> Fault:
        """Answer as usual, but with changed events."""

        def answer(request: Request) -> Response:  # the body was read before
            return StreamingResponse(iter(change(list(self.events(request._json)))), media_type=self.media_type)

        return answer

    def broken_off(self, request: Request) -> Response:
        """A fault: the connection breaks after five events."""

        async def begun() -> AsyncIterator[Any]:
            for event in self.events(request._json)[:5]:
                yield event
            raise ConnectionResetError

        return StreamingResponse(begun())

    def app(self) -> Starlette:
        gets = [Route(path, handler) for path, handler in self.pages().items()]
        return Starlette(routes=gets + [Route(*call, methods=["POST"]) for call in self.calls().items()])

    async def health(self, request: Request) -> Response:
        del request
        return Response(status_code=200 if self.is_healthy else 500)

    async def tell(self, request: Request) -> Response:
        del request
        facts = FACTS.get(FORMATS[self.kind].facts_path, {}) if self.facts is None else self.facts
        return Response(status_code=facts) if isinstance(facts, int) else JSONResponse(facts)

    async def tokenize(self, request: Request) -> Response:
        assert await request.json()
        name = TOKENIZER_PAGES[self.kind].field
        return JSONResponse([{"id": id_} for id_ in self.sample] if name is None else {name: self.sample})

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        if not body:  # a check of credentials
            return JSONResponse({}, self.check_status)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.urls.append(str(request.url))
        self.received(request)
        if (fault := self.fault_for(body)) is not None:
            return fault(request)
        return StreamingResponse(self.answer(body), media_type=self.media_type)

    async def _paced(self, events: Sequence[str | bytes]) -> AsyncIterator[str | bytes]:
        self.streams += 1
        is_another = self.is_another
        while is_another and self.first_streams:  # the first one ends before the other listens
            await asyncio.sleep(0.005)
        self.first_streams += not is_another
        try:
            for event in events:
                await asyncio.sleep(self.token_s)
                if self.is_another != is_another:
                    raise ConnectionResetError("started anew")
                yield event
        finally:
            self.streams -= 1
            self.first_streams -= not is_another


AnyReplay = Replay | VllmReplay
Running = TypeVar("Running", bound=Replay)


class ReplayOf(Protocol):
    """Returns the only server of a kind or a class, reset."""

    @overload
    def __call__(self, kind: str) -> Any: ...

    @overload
    def __call__(self, kind: type[Running]) -> Running: ...


@contextlib.contextmanager
def running(replay: Running) -> Iterator[Running]:
    """Run it on a free local port, in a separate thread."""
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


@contextlib.contextmanager
def running_on_demand() -> Iterator[ReplayOf]:
    """Start servers on demand, and stop them all together."""
    with contextlib.ExitStack() as stack:
        replays: dict[object, AnyReplay] = {}

        def of(kind: Any) -> Any:
            if kind not in replays:
                begun: Any = (
                    VllmReplay().installed()
                    if kind == VllmReplay.kind
                    else running(Replay(kind) if isinstance(kind, str) else kind())
                )
                replays[kind] = stack.enter_context(begun)
            replays[kind].forget()
            return replays[kind]

        yield of
