"""Servers that speak the wire formats as their makers publish them, around a language model that is a hash.

Not the real servers: those are asked by ``make conformance-llamacpp`` and ``make conformance-vllm``. The next token
depends on the tokens before it alone, so that a continuation equals the undisturbed answer. ``faults`` holds what the
next requests do instead.
"""

import asyncio
import contextlib
import hashlib
import json
import random
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

EOS_ID: Final = 1
FIRST_ID: Final = 40  # what comes before are special tokens and control characters
VOCABULARY: Final = 300
CONTEXT: Final = 200
SLOTS: Final = 4

Fault = Callable[[Request], Response]


def likeliest(ids: Sequence[int], count: int, noise: float = 0.0) -> list[tuple[int, float]]:
    """The next tokens, likeliest first."""
    digest = hashlib.sha256(repr((tuple(ids[-6:]), len(ids), noise)).encode()).digest()
    return [(FIRST_ID + digest[place] % (VOCABULARY - FIRST_ID), -0.1 - place) for place in range(max(1, count))]


@dataclass(frozen=True)
class Wanted:
    """What a request asks for, in whatever format."""

    ids: list[int]
    max_tokens: int
    noise: float  # of the seed, where it is sampled
    logprobs: int | None
    stop_ids: frozenset[int]

    def tokens(self) -> list[list[tuple[int, float]]]:
        ids, made = list(self.ids), []
        while len(made) < self.max_tokens:
            made.append(likeliest(ids, self.logprobs or 1, self.noise))
            ids.append(made[-1][0][0])
            if ids[-1] in self.stop_ids:
                break
        return made


def noise_of(temperature: float, seed: int | None) -> float:
    if temperature == 0:
        return 0.0
    return random.Random(seed).random()


@dataclass
class Replay:
    """One server: its address, what it was asked, and the faults of its next requests."""

    kind: str
    faults: deque[Fault] = field(default_factory=deque)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    is_healthy: bool = True
    token_s: float = 0.0
    streams: int = 0  # that run
    url: str = ""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=200 if self.is_healthy else 500)

        @app.get("/props")
        async def props() -> dict[str, Any]:
            return {"default_generation_settings": {"n_ctx": CONTEXT}, "total_slots": SLOTS, "model_alias": "replay"}

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": "replay", "object": "model", "max_model_len": CONTEXT}]}

        @app.get("/get_model_info")
        async def model_info() -> dict[str, Any]:
            return {"model_path": "replay", "is_generation": True}

        @app.post("/completion")
        @app.post("/v1/completions")
        @app.post("/generate")
        async def generate(request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            if self.faults:
                return self.faults.popleft()(request)
            events = {"llamacpp": llamacpp_events, "vllm": vllm_events, "sglang": sglang_events}[self.kind]
            return StreamingResponse(self._paced(events(body)), media_type="text/event-stream")

        return app

    async def _paced(self, events: Sequence[str]) -> AsyncIterator[str]:
        self.streams += 1
        try:
            for event in events:
                await asyncio.sleep(self.token_s)
                yield event
        finally:
            self.streams -= 1


def sse(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def llamacpp_events(body: Mapping[str, Any]) -> list[str]:
    wanted = Wanted(
        body["prompt"],
        body["n_predict"],
        noise_of(body["temperature"], body.get("seed")),
        body.get("n_probs"),
        frozenset(),
    )
    events = []
    for top in wanted.tokens():
        event: dict[str, Any] = {"index": 0, "content": "?", "tokens": [top[0][0]], "stop": False}
        if wanted.logprobs:
            candidates = [{"id": id_, "token": "?", "logprob": logprob} for id_, logprob in top]
            event["completion_probabilities"] = [{**candidates[0], "top_logprobs": candidates}]
        events.append(sse(event))
    return [*events, sse({"index": 0, "tokens": [], "stop": True, "stop_type": "limit", "timings": {"cache_n": 0}})]


def vllm_events(body: Mapping[str, Any]) -> list[str]:
    wanted = Wanted(
        body["prompt"],
        body["max_tokens"],
        noise_of(body["temperature"], body.get("seed")),
        body.get("logprobs"),
        frozenset(body["stop_token_ids"]),
    )
    tokens = wanted.tokens()
    events = []
    for place, top in enumerate(tokens):
        is_stop = top[0][0] in wanted.stop_ids
        reason = "stop" if is_stop else "length" if place + 1 == len(tokens) else None
        choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": [top[0][0]], "finish_reason": reason}
        choice["logprobs"] = None
        if wanted.logprobs is not None:
            told = {f"token_id:{id_}": logprob for id_, logprob in top}
            choice["logprobs"] = {"token_logprobs": [top[0][1]], "top_logprobs": [told]}
        events.append(sse({"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": None}))
    usage = {"prompt_tokens": len(wanted.ids), "completion_tokens": len(tokens), "prompt_tokens_details": None}
    return [*events, sse({"id": "cmpl-1", "choices": [], "usage": usage}), "data: [DONE]\n\n"]


def sglang_events(body: Mapping[str, Any]) -> list[str]:
    sampling = body["sampling_params"]
    wanted = Wanted(
        body["input_ids"],
        sampling["max_new_tokens"],
        noise_of(sampling["temperature"], None),
        None,
        frozenset(sampling["stop_token_ids"]),
    )
    tokens = wanted.tokens()
    output: list[int] = []
    events = []
    for place, top in enumerate(tokens):
        output.append(top[0][0])
        is_last = place + 1 == len(tokens)
        kind = "stop" if top[0][0] in wanted.stop_ids else "length"
        meta = {"completion_tokens": len(output), "finish_reason": {"type": kind} if is_last else None}
        events.append(sse({"text": "?", "output_ids": list(output), "meta_info": meta}))
    return [*events, "data: [DONE]\n\n"]


@contextlib.contextmanager
def running(replay: Replay) -> Iterator[Replay]:
    """Let it listen on a free port of this machine, in a thread of its own."""
    config = uvicorn.Config(replay.app(), port=0, log_config=None, access_log=False, lifespan="off")
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
