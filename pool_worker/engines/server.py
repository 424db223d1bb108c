"""An inference server behind a URL as an engine: token ids in, token ids out, so that nothing is lost on the way.

    submit ──> one stream a choice (POST, server-sent events) ──token ids──> text, stop conditions ──> steps

The server only makes tokens. Their text, stop strings, the count and the end are made here, as for our own engine, so
that a choice can go on at any other pool of the model from the very tokens it has. What differs between servers is in
``formats``. A watch asks for the server's health: one that does not answer, or makes no tokens for any of its streams,
is lost (EngineDiedError), and the worker's jobs go elsewhere.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from engine.admission import check_request
from engine.detokenizer import TokenText
from engine.errors import RequestRejected
from engine.pooling_types import PoolingRequest
from engine.step_stats import StepStats
from engine.types import EngineCounters, EngineInfo, EngineStats, GenerationRequest, Refusal, SequenceOutput
from pool_worker.engines.base import Capacity, EngineDiedError
from pool_worker.engines.formats import FORMATS
from pool_worker.engines.formats.base import Delta, MalformedEvent, ServerFacts, ServerFailure, refuse_unknown
from pool_worker.engines.server_choice import ServerChoice
from pool_worker.engines.tokenizer_folder import TokenizerFolder, TokenizerFolderError
from pool_worker.settings import ServerEngineSettings
from protocol.artifacts import tokenizer_object_name
from protocol.messages import PROTOCOL_VERSION, ModelCard

HEALTH_PERIOD_S: Final = 1.0
READY_PERIOD_S: Final = 0.5
BUSY_WAIT_S: Final = 1.0  # after a 429 or 503 without a Retry-After
MAX_BUSY_WAIT_S: Final = 10.0
BUSY_TRIES: Final = 3  # of one choice, before the gateway looks for another pool
RETRY_SHARE: Final = 0.2  # of all choices: how many may be asked for again, so that retries cannot amplify an overload
MAX_RETRIES_SAVED: Final = 10.0
MAX_EVENT_BYTES: Final = 1024 * 1024
MAX_ERROR_CHARS: Final = 500
MAX_REVISION_CHARS: Final = 64
BUSY_STATUSES: Final = frozenset({429, 503, 529})
REFUSED_STATUSES: Final = frozenset({400, 413, 422})  # about this request; all others are about the server or its key

log = logging.getLogger(__name__)
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class AttemptFailed(Exception):
    """This server did not answer to the end; another may."""


class ServerEngine:
    """See the module; the order of life is that of ``base.Engine``."""

    def __init__(self, settings: ServerEngineSettings) -> None:
        self.name: str = settings.kind
        self._settings = settings
        self._format = FORMATS[settings.kind]
        self._client: httpx.AsyncClient
        self._tokenizer: TokenizerFolder
        self._tokens: TokenText
        self._info: EngineInfo
        self._facts: ServerFacts
        self._places: asyncio.Semaphore
        self._tasks: dict[str, dict[ServerChoice, asyncio.Task[None]]] = {}  # by request
        self._ready: deque[SequenceOutput] = deque()  # what the next step yields
        self._changed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._death: EngineDiedError | None = None
        self._running: set[ServerChoice] = set()
        self._waiting = 0
        self._heard_s = 0.0  # monotonic clock: the last event of any stream
        self._retries = MAX_RETRIES_SAVED
        self._counters = EngineCounters()
        self._stats = StepStats()
        self._is_stopped = False

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> Capacity:
        """Wait until the server is ready, and learn what it can hold. Raises EngineDiedError."""
        settings = self._settings
        try:
            self._tokenizer = await asyncio.to_thread(TokenizerFolder, Path(settings.tokenizer))
        except TokenizerFolderError as error:
            raise EngineDiedError(f"engine.tokenizer: {error}") from error
        self._tokens = TokenText(self._tokenizer)
        key = settings.api_key
        self._client = httpx.AsyncClient(
            base_url=settings.url.rstrip("/"),
            headers={} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"},
            timeout=httpx.Timeout(settings.silence_s, connect=settings.connect_s, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=settings.max_sequences or 256),
            trust_env=False,
        )
        self._facts = await self._wait_until_ready()
        length = settings.max_model_len or self._facts.max_model_len
        if length is None:
            raise EngineDiedError(f"engine.max_model_len: required, since {settings.url} does not tell")
        sequences = settings.max_sequences or self._facts.max_sequences or 64
        kv_tokens = settings.max_kv_tokens or sequences * length
        self._places = asyncio.Semaphore(sequences)
        self._info = EngineInfo(
            model=self._facts.model,
            max_model_len=length,
            max_sequences=sequences,
            kv_tokens=kv_tokens,
            eos_token_ids=tuple(sorted(self._tokenizer.eos_ids)),
            dtype="unknown",
            quantize=None,
            device="remote",
            vocab_size=len(self._tokenizer),
            parameters=0,
        )
        log.info(
            "%s at %s serves %s: %d sequences of %d tokens",
            self.name,
            settings.url,
            self._facts.model,
            sequences,
            length,
        )
        self._watching = asyncio.create_task(self._watch(), name="server health")
        return Capacity(sequences, kv_tokens, length)

    async def _wait_until_ready(self) -> ServerFacts:
        deadline_s = time.monotonic() + self._settings.ready_s
        while True:
            try:
                (await self._client.get(self._format.health_path)).raise_for_status()
                answer = (await self._client.get(self._format.facts_path)).raise_for_status()
                return self._format.facts(_decode(answer.content), self._settings.model)
            except (MalformedEvent, msgspec.DecodeError) as error:
                raise EngineDiedError(f"{self._settings.url} is no {self.name} server: {error}") from error
            except httpx.HTTPError as error:
                if time.monotonic() >= deadline_s:
                    raise EngineDiedError(f"{self._settings.url} is not ready: {_reason(error)}") from error
            await asyncio.sleep(READY_PERIOD_S)

    async def _watch(self) -> None:
        """Ask for the server's health until it is lost."""
        healthy_s = time.monotonic()
        while self._death is None:
            await asyncio.sleep(HEALTH_PERIOD_S)
            try:
                answer = await self._client.get(self._format.health_path, timeout=self._settings.health_limit_s)
                answer.raise_for_status()
            except httpx.HTTPError as error:
                if time.monotonic() - healthy_s > self._settings.health_limit_s:
                    self._lose(_reason(error))
            else:
                healthy_s = time.monotonic()

    def _lose(self, reason: str) -> None:
        self._death = EngineDiedError(f"{self._settings.url} is lost: {reason}")
        self._changed.set()

    def model_card(self, model: str) -> tuple[ModelCard, bytes]:
        """See ``base.Engine``."""
        tokenizer_json = self._tokenizer.backend_tokenizer.to_str().encode()
        templates = self._tokenizer.chat_templates
        card = ModelCard(
            v=PROTOCOL_VERSION,
            model=model,
            context_length=self._info.max_model_len,
            tokenizer_object=tokenizer_object_name(tokenizer_json),
            chat_template=templates.get("default"),
            special_tokens=self._tokenizer.special_tokens,
            tool_template=templates.get("tool_use"),
            revision=self._settings.revision or f"{self.name}:{self._facts.model}"[:MAX_REVISION_CHARS],
        )
        return card, tokenizer_json

    async def steps(self) -> AsyncIterator[Sequence[SequenceOutput]]:
        """See ``base.Engine``: what has come from all streams since the last step."""
        while not self._is_stopped:
            if self._ready:
                outputs = list(self._ready)
                self._ready.clear()
                yield outputs
            if self._death is not None:
                raise self._death
            await self._changed.wait()
            self._changed.clear()

    def stats(self) -> EngineStats:
        """See ``base.Engine``."""
        live = [choice for choice in self._running if choice.text.finish_reason is None]
        usage = min(1.0, sum(choice.total_tokens for choice in live) / self._info.kv_tokens)
        return self._stats.told(running=len(live), waiting=self._waiting, kv_usage=usage, counters=self._counters)

    async def stop(self) -> None:
        """See ``base.Engine``."""
        self._is_stopped = True
        self._changed.set()
        tasks = {task for running in self._tasks.values() for task in running.values()}
        if self._watching is not None:
            tasks.add(self._watching)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if hasattr(self, "_client"):
            await self._client.aclose()

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest | PoolingRequest) -> None:
        """See ``base.Engine``."""
        try:
            choices = self._choices(request)
        except RequestRejected as error:
            self._put(Refusal.of(request.request_id, error))
            return
        self._tasks[request.request_id] = tasks = {}
        for choice in choices:
            output = choice.replay()
            if output is not None:
                self._put(output)
            if choice.text.finish_reason is None:
                tasks[choice] = task = asyncio.create_task(self._run(choice), name=choice.request_id)
                task.add_done_callback(lambda _, choice=choice: self._forget(choice))  # type: ignore[misc]  # bound now
        if not tasks:
            del self._tasks[request.request_id]

    def _choices(self, request: GenerationRequest | PoolingRequest) -> list[ServerChoice]:
        if not isinstance(request, GenerationRequest):
            raise RequestRejected("model", "this pool's server makes text and nothing else")
        if request.request_id in self._tasks:
            raise RequestRejected("request_id", f"{request.request_id!r} is already running")
        check_request(request, self._info)
        params = request.sampling
        refuse_unknown(params, self._format.honoured, self._format.grammars, self.name)
        if params.grammar is not None and any(point.token_ids for point in request.resume):
            # The server would begin the grammar anew in the middle of the answer.
            raise RequestRejected(params.grammar.field, "this pool's server cannot go on with a half-made answer to it")
        return [ServerChoice(request, index, self._tokens, self._tokenizer.eos_ids) for index in range(params.n)]

    def cancel(self, request_id: str) -> None:
        """See ``base.Engine``."""
        for choice, task in self._tasks.get(request_id, {}).items():
            if choice.text.finish_reason is None:
                self._put(choice.end("cancelled"))
            task.cancel()

    def _put(self, output: SequenceOutput) -> None:
        self._ready.append(output)
        self._changed.set()

    def _forget(self, choice: ServerChoice) -> None:
        tasks = self._tasks[choice.request_id]
        del tasks[choice]
        if not tasks:
            del self._tasks[choice.request_id]

    # --- one choice ---------------------------------------------------------------------------------------------------

    async def _run(self, choice: ServerChoice) -> None:
        try:
            await self._generate(choice)
        except AttemptFailed as error:
            self._put(choice.end("error", str(error)))
        except RequestRejected as error:
            self._put(Refusal.of(choice.request_id, error))
        except Exception as error:  # whatever one stream does, the others go on
            log.exception("a stream of %s failed", choice.request_id)
            self._put(choice.end("error", repr(error)))

    async def _generate(self, choice: ServerChoice) -> None:
        if choice.params.max_tokens == 0:
            self._put(choice.end("length"))
            return
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        with self._place_of(choice):
            for attempt in range(BUSY_TRIES):
                wait_s = await self._stream(choice)
                if wait_s is None:
                    return
                if attempt + 1 == BUSY_TRIES or self._retries < 1:
                    break
                self._retries -= 1
                await asyncio.sleep(wait_s)
            raise AttemptFailed("the server is busy")

    @contextlib.contextmanager
    def _place_of(self, choice: ServerChoice) -> Iterator[None]:
        self._retries = min(MAX_RETRIES_SAVED, self._retries + RETRY_SHARE)
        if not self._running:
            self._heard_s = time.monotonic()
        self._running.add(choice)
        choice.clock.scheduled_s = time.monotonic()
        self._counters.prompt_tokens += choice.prompt_tokens
        try:
            yield
        finally:
            self._running.discard(choice)
            self._places.release()

    async def _stream(self, choice: ServerChoice) -> float | None:
        """Read one stream to the choice's end; return how long to wait where the server is too busy to begin one."""
        body = msgspec.json.encode(self._format.body(choice.ask(self._facts.model)))
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        try:
            async with self._client.stream(
                "POST", self._format.generate_path, content=body, headers=headers
            ) as response:
                if response.status_code != httpx.codes.OK:
                    return await self._refused(response)
                async for event in _events(response):
                    self._take(choice, self._format.read(_decode(event), choice.streamed_tokens))
                    if choice.text.finish_reason is not None:
                        return None  # the connection is closed, which tells the server to stop
        except (MalformedEvent, msgspec.DecodeError) as error:
            raise AttemptFailed(f"the server's answer is malformed: {error}") from error
        except ServerFailure as error:
            raise AttemptFailed(f"the server failed: {str(error)[:MAX_ERROR_CHARS]}") from error
        except httpx.ReadTimeout as error:
            if time.monotonic() - self._heard_s >= self._settings.silence_s:  # and none of its other streams says more
                self._lose("it is healthy, and makes no tokens")
            raise AttemptFailed(f"the server was silent for {self._settings.silence_s:g} s") from error
        except httpx.HTTPError as error:
            raise AttemptFailed(f"the connection to the server broke: {_reason(error)}") from error
        raise AttemptFailed("the server's answer has no end")

    async def _refused(self, response: httpx.Response) -> float:
        """Return how long to wait for a busy server. Raises RequestRejected or AttemptFailed for all else."""
        status = response.status_code
        if status in BUSY_STATUSES:
            with contextlib.suppress(ValueError):
                return min(MAX_BUSY_WAIT_S, max(0.0, float(response.headers.get("retry-after", BUSY_WAIT_S))))
            return BUSY_WAIT_S
        text = (await _head_of(response)).decode(errors="replace")
        if status in REFUSED_STATUSES:
            raise RequestRejected("model", f"this pool's server refused the request: {text}")
        raise AttemptFailed(f"the server answered {status}: {text}")

    def _take(self, choice: ServerChoice, delta: Delta) -> None:
        now_s = self._heard_s = time.monotonic()
        output = choice.take(delta)
        if output is None:
            return
        if output.token_ids:
            self._stats.tokens_came([choice.clock], now_s)
            self._stats.step_tokens.observe(len(output.token_ids))
            self._counters.generated_tokens += len(output.token_ids)
        self._put(output)


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event but ``[DONE]``. Raises MalformedEvent for one that is too long."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise MalformedEvent(f"an event has more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data and data != b"[DONE]":
                yield data


async def _head_of(response: httpx.Response) -> bytes:
    """Return the beginning of an error's body."""
    head = b""
    with contextlib.suppress(httpx.HTTPError):
        async for chunk in response.aiter_bytes():
            head += chunk
            if len(head) >= MAX_ERROR_CHARS:
                break
    return head[:MAX_ERROR_CHARS]


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
