"""The connection to an inference server: HTTP streams, their limits, and the handling of the server's faults.

A fault concerns the request (RequestRejected: not retried), this attempt (AttemptFailed: another pool resumes it) or
the whole server (``lose``: the worker leaves and its jobs go elsewhere). A busy server is not a fault (ServerBusy: the
request waits again). Silence is measured by the answer's content, not by bytes. Callers define requests and interpret
events; a ``Framing`` splits a body into events.
"""

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from engine.errors import RequestRejected
from pool_worker.engines.base import EngineDiedError
from pool_worker.engines.event_decoder import EventDecoder
from pool_worker.engines.formats.base import ServerFacts
from pool_worker.engines.framing import DONE, FRAMINGS, Framing, MalformedEvent, ServerFailure
from pool_worker.engines.reported_errors import failure_in
from pool_worker.engines.server_busy import ServerBusy, asked_wait_s
from pool_worker.engines.server_client import OPENAI_PATHS, client_of, final_advice, hidden, secrets_of, shown
from pool_worker.engines.server_facts import FactsUnread, FactsWatch
from pool_worker.engines.sidecar.readiness import Readiness
from pool_worker.settings import ConnectionSettings
from protocol.http_client import httpx
from protocol.process import wait_for
from protocol.wire import UNDECODABLE

HEALTH_PERIOD_S: Final = 1.0
PAGE_LIMIT_S: Final = 5.0
PAGE_LIMIT_BYTES: Final = 4 * 1024 * 1024
LONGEST_WAIT_HERE_S: Final = 0.25  # maximum wait of a stream for a busy server; longer waits belong in the queue
BUSY_TRIES: Final = 3  # per stream, before it goes back to the queue
RETRY_SHARE: Final = 0.2  # retries per stream, so that they cannot amplify an overload
MAX_RETRIES_SAVED: Final = 10.0
MAX_ERROR_CHARS: Final = 500
SILENCE_STEPS: Final = 20  # per silence limit: its accuracy, without a timer for each event
SILENCED_STREAMS: Final = 3  # in a row: then the server is lost
BUSY_STATUSES: Final = frozenset({429, 503, 529})
CREDENTIAL_STATUSES: Final = frozenset({401, 403})
REFUSED_STATUSES: Final = frozenset({400, 413, 422})  # about this request; all others are about the server or its key

log = logging.getLogger(__name__)

_HEADERS: Final = {"content-type": "application/json", "accept": "text/event-stream, application/x-ndjson"}
_decode = msgspec.json.Decoder(dict[str, Any]).decode

HttpStatus = Callable[[int, Mapping[str, str], str], int]  # status, headers, start of the body → its HTTP meaning


class AttemptFailed(Exception):
    """This server did not finish the answer; another may."""


class Taken(enum.Enum):
    """How an event advances the answer."""

    NOTHING = enum.auto()  # like a comment: the stream counts as silent
    SOME = enum.auto()
    ALL = enum.auto()  # complete


class Answer(Protocol):
    """Reads a server's answer to one request."""

    @property
    def has_begun(self) -> bool:
        """True once the caller has received part of it."""
        ...

    def take(self, event: Mapping[str, Any]) -> Taken:
        """Read an event. Raises MalformedEvent or ServerFailure."""
        ...

    def done(self) -> bool:
        """Note the server's end; return whether the answer can be complete. Raises MalformedEvent."""
        ...


class ServerConnection:
    """Streams of one server, and its health. ``lose`` is called once with the reason when the server is lost."""

    def __init__(
        self,
        settings: ConnectionSettings,
        lose: Callable[[str], None],
        auth: httpx.Auth | None = None,
        http_status: HttpStatus = lambda status, _headers, _text: status,
        api_paths: Sequence[str] = OPENAI_PATHS,
        *,
        is_ours: bool = False,
    ) -> None:
        """Open nothing yet. ``auth`` signs requests, if a bearer token is not enough.

        ``api_paths``: paths that the settings' URL may end in. ``is_ours``: the server is a self-hosted engine, which
        may hang; a hosted API is never lost for silence. Raises EngineDiedError.
        """
        self._settings = settings
        self._lose = lose
        self._http_status = http_status
        self._is_ours = is_ours
        timeout = httpx.Timeout(settings.silence_s, connect=settings.connect_s, pool=None)
        self._client = client_of(settings, api_paths=api_paths, auth=auth, timeout=timeout)
        self.address = shown(str(self._client.base_url))  # for logs and errors
        self._secrets = secrets_of(settings)
        self._prefilling = 0  # streams without any content yet
        self._silenced = 0  # streams, in a row, that fell silent
        self._retries = MAX_RETRIES_SAVED
        self._is_watched = False
        self._is_reachable = asyncio.Event()
        self._is_reachable.set()
        self.facts_watch: FactsWatch | None = None  # None: what the server serves is not checked
        self._proving_streams = 0  # running streams that began on the unchanged server

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    # --- health -------------------------------------------------------------------------------------------------------

    async def wait_until_ready(self, health_path: str, facts_path: str | None = None) -> dict[str, Any]:
        """Wait for a ready server; return its answer at ``facts_path``, if given. Raises EngineDiedError."""
        wait = Readiness(self.address, self._settings.ready_s)
        while True:
            try:
                (await self._client.get(health_path)).raise_for_status()
                if facts_path is None:
                    return {}
                return _decode((await self._client.get(facts_path)).raise_for_status().content)
            except UNDECODABLE as error:
                raise EngineDiedError(
                    f"{self.address}{facts_path} did not answer with a JSON object: {error}"
                ) from error
            except httpx.HTTPError as error:
                self._raise_if_final(error)
                await wait.not_yet(_reason(error))

    async def check_credentials(self, path: str) -> None:
        """Post an empty request, to check whether the server accepts the credentials. Raises EngineDiedError.

        It costs nothing: every known API checks credentials first.
        """
        place = shown(self.address + path)
        try:
            async with (
                asyncio.timeout(self._settings.health_limit_s),
                self._client.stream("POST", path, content=b"{}", headers=_HEADERS) as response,
            ):
                text = (await _head_of(response)).decode(errors="replace")
                status = self._http_status(response.status_code, response.headers, text)
        except (httpx.HTTPError, TimeoutError) as error:
            if isinstance(error, httpx.HTTPError):
                self._raise_if_final(error)
            log.warning("cannot reach %s yet: %s", place, _reason(error))
            return
        if status in CREDENTIAL_STATUSES:
            raise EngineDiedError(_refused_credentials(place, status, self._hidden(text)))
        if status == httpx.codes.NOT_FOUND:
            log.warning("%s answered 404; check engine.url and engine.model: %s", place, self._hidden(text))

    def _raise_if_final(self, error: httpx.HTTPError) -> None:
        """Raise EngineDiedError for an error that waiting cannot fix."""
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in CREDENTIAL_STATUSES:
            place, text = shown(str(error.request.url)), error.response.text[:MAX_ERROR_CHARS]
            refused = _refused_credentials(place, error.response.status_code, self._hidden(text))
            raise EngineDiedError(refused) from error
        advice = final_advice(error)
        if advice is not None:
            raise EngineDiedError(f"{self.address}: {_reason(error)}; {advice}") from error

    async def facts(self, path: str, facts_of: Callable[[dict[str, Any]], ServerFacts]) -> ServerFacts:
        """Return the server's current facts. Raises FactsUnread."""
        page = await self.page(path)
        try:
            return facts_of(_decode(page))
        except (MalformedEvent, *UNDECODABLE) as error:
            raise FactsUnread(f"{self.address}{path}: {error}" if page else f"{self.address}{path} is empty") from error

    async def page(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Return the server's answer at ``path``, to ``body`` if given; b"" if it is empty or too large."""
        page, method = b"", "GET" if body is None else "POST"
        try:
            async with asyncio.timeout(PAGE_LIMIT_S), self._client.stream(method, path, json=body) as response:
                if not response.is_success:
                    return b""
                async for chunk in response.aiter_bytes():
                    page += chunk
                    if len(page) > PAGE_LIMIT_BYTES:
                        return b""
        except (httpx.HTTPError, TimeoutError):
            return b""
        return page

    async def watch(self, health_path: str) -> None:
        """Poll the server's health until it is lost."""
        healthy_s = time.monotonic()
        self._is_watched = True
        was_refused = False  # of the last healthy answer
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            try:
                answer = await self._client.get(health_path, timeout=self._settings.health_limit_s)
                answer.raise_for_status()
            except httpx.HTTPError as error:
                self._note_reconnect()
                is_refused = isinstance(error, httpx.ConnectError)
                if (is_refused and was_refused) or time.monotonic() - healthy_s > self._settings.health_limit_s:
                    self._lose(_reason(error))
                    return
                was_refused = is_refused
            else:
                healthy_s, was_refused = time.monotonic(), False
                self._is_reachable.set()

    # --- streams ------------------------------------------------------------------------------------------------------

    async def stream(self, path: str, body: Mapping[str, Any], framing: Framing, answer: Answer) -> None:
        """Post a body and pass on each event of the answer until ``answer`` is complete.

        Retries a briefly busy server, within limits. Raises RequestRejected, AttemptFailed and ServerBusy;
        MalformedEvent and ServerFailure from ``answer`` become AttemptFailed.
        """
        try:
            await self._stream(path, body, framing, answer)
        except AttemptFailed as error:
            if error.__cause__ is None or isinstance(error.__cause__, httpx.TransportError):
                self._note_reconnect()  # the server may have been restarted
            log.warning("%s: %s", shown(self.address + path), error)  # callers get the error itself
            raise

    async def _stream(self, path: str, body: Mapping[str, Any], framing: Framing, answer: Answer) -> None:
        self._retries = min(MAX_RETRIES_SAVED, self._retries + RETRY_SHARE)
        content = msgspec.json.encode(body)
        for attempt in range(BUSY_TRIES):
            busy = await self._stream_once(path, content, framing, answer)
            if busy is None:
                return
            is_short = busy.wait_s is not None and busy.wait_s <= LONGEST_WAIT_HERE_S
            if not is_short or attempt + 1 == BUSY_TRIES or self._retries < 1:
                raise busy
            self._retries -= 1
            await asyncio.sleep(busy.wait_s or 0.0)

    async def _stream_once(self, path: str, content: bytes, framing: Framing, answer: Answer) -> ServerBusy | None:
        """Read one stream; return the answer of a server that is too busy to begin one."""
        timeout = httpx.Timeout(None, connect=self._settings.connect_s)
        try:
            async with (
                self._checked() as rejection_reason,
                self._limited_silence() as heard,
                self._client.stream("POST", path, content=content, headers=_HEADERS, timeout=timeout) as response,
            ):
                if (rejection := await rejection_reason(response.status_code)) is not None:
                    return rejection
                if response.status_code != httpx.codes.OK:
                    return await self._refused(response)
                async for taken in self._taken(response, framing, answer):
                    if isinstance(taken, ServerBusy):
                        return taken
                    if taken is Taken.ALL:
                        return None  # closing the connection makes the server stop
                    if taken is Taken.SOME:
                        heard()
        except httpx.ConnectError as error:
            if await self._wait_until_healthy():
                return ServerBusy("the server was away", 0.0)
            raise AttemptFailed(f"cannot reach the server: {_reason(error)}") from error
        except (MalformedEvent, *UNDECODABLE, ServerFailure, httpx.HTTPError) as error:
            raise AttemptFailed(self._hidden(_fault(error))) from error
        raise AttemptFailed("the server's answer has no end")

    @contextlib.asynccontextmanager
    async def _checked(self) -> AsyncIterator[Callable[[int], Awaitable[ServerBusy | None]]]:
        """Check, while a stream begins, that the server is unchanged, unless a running stream proves it.

        Yields a function to call with the answer's status before reading it; it returns a reason to reject the answer.
        """
        watch, checking, is_proof = self.facts_watch, None, False
        if watch is not None and not (watch.is_proved and self._proving_streams):
            checking = asyncio.create_task(watch.check(), name="facts")

        async def rejection_reason(status: int) -> ServerBusy | None:
            nonlocal is_proof
            if checking is not None:
                await checking
            reason = None if watch is None else watch.rejection_reason(is_answer=status == httpx.codes.OK)
            if reason is not None:
                return ServerBusy(reason, None)
            is_proof = True
            self._proving_streams += 1
            return None

        try:
            yield rejection_reason
        finally:
            self._proving_streams -= is_proof
            if checking is not None:
                checking.cancel()
                await asyncio.gather(checking, return_exceptions=True)

    def _note_reconnect(self) -> None:
        if self.facts_watch is not None:
            self.facts_watch.reconnected()

    @contextlib.asynccontextmanager
    async def _limited_silence(self) -> AsyncIterator[Callable[[], None]]:
        """Limit how long a stream sends no content; call the yielded function when content arrives."""
        silence_s, loop = self._settings.silence_s, asyncio.get_running_loop()
        heard_s: float | None = None  # when the limit was last extended

        def heard() -> None:
            nonlocal heard_s
            self._silenced = 0
            self._prefilling -= heard_s is None
            now_s = loop.time()
            if heard_s is None or now_s - heard_s > silence_s / SILENCE_STEPS:
                heard_s = now_s
                limit.reschedule(now_s + silence_s)

        self._prefilling += 1
        try:
            async with asyncio.timeout(silence_s) as limit:
                yield heard
        except TimeoutError as error:
            raise AttemptFailed(self._silence(has_begun=heard_s is not None)) from error
        finally:
            self._prefilling -= heard_s is None

    def _silence(self, *, has_begun: bool) -> str:
        """Return the error of a silent stream. If several begun streams are silent, a self-hosted server is lost."""
        silence_s = self._settings.silence_s
        if not has_begun:
            return f"no token within {silence_s:g} s (engine.silence_s; raise it if long prompts take longer)"
        self._silenced += 1
        # A long prefill may delay all other streams.
        if self._is_ours and self._silenced >= SILENCED_STREAMS and not self._prefilling:
            self._lose(f"it is healthy but made no tokens for {silence_s:g} s (engine.silence_s)")
        return f"the server was silent for {silence_s:g} s (engine.silence_s)"

    async def _taken(
        self, response: httpx.Response, framing: Framing, answer: Answer
    ) -> AsyncIterator[Taken | ServerBusy]:
        """Pass events to ``answer``; yield how each advances it. Raises what ``answer`` and ``_judged`` raise."""
        events = EventDecoder()
        try:
            async for data in FRAMINGS[framing](response.aiter_bytes()):
                if data == DONE:
                    if answer.done():
                        yield Taken.ALL
                    return
                event = events.read(data)
                failure = failure_in(event)
                if failure is not None:
                    raise failure
                yield answer.take(event)
        except ServerFailure as failure:
            if failure.status is None or answer.has_begun:
                raise
            text = self._hidden(str(failure)[:MAX_ERROR_CHARS])
            yield _judged(failure.status, text, response.headers)

    async def _refused(self, response: httpx.Response) -> ServerBusy:
        """Return a busy server's error. Raises RequestRejected or AttemptFailed for any other error."""
        text = (await _head_of(response)).decode(errors="replace")
        status = self._http_status(response.status_code, response.headers, text)
        return _judged(status, self._hidden(text), response.headers)

    def _hidden(self, text: str) -> str:
        """Return the server's text without secrets: error pages echo request headers."""
        return hidden(text, self._secrets)

    async def _wait_until_healthy(self) -> bool:
        """Wait for the health check: failing at once while the server is down would drain the whole queue."""
        self._note_reconnect()
        if not self._is_watched:
            return False
        self._is_reachable.clear()
        return await wait_for(self._is_reachable, self._settings.health_limit_s)


def _judged(status: int, text: str, headers: Mapping[str, str]) -> ServerBusy:
    """Return a busy server's error. Raises RequestRejected or AttemptFailed for any other error."""
    if status in BUSY_STATUSES:
        return ServerBusy(f"the server is busy: it answered {status}: {text}", asked_wait_s(headers, text, time.time()))
    if status in REFUSED_STATUSES:
        raise RequestRejected("model", f"this pool's server refused the request: {text}")
    raise AttemptFailed(f"the server answered {status}: {text}")


def _fault(error: Exception) -> str:
    """Return what went wrong with one stream."""
    if isinstance(error, ServerFailure):
        return f"the server failed: {str(error)[:MAX_ERROR_CHARS]}"
    if isinstance(error, httpx.HTTPError):
        return f"the connection to the server broke: {_reason(error)}"
    return f"the server's answer is malformed: {error}"


async def _head_of(response: httpx.Response) -> bytes:
    """Return the beginning of an error's body."""
    head = b""
    with contextlib.suppress(httpx.HTTPError):
        async for chunk in response.aiter_bytes():
            head += chunk
            if len(head) >= MAX_ERROR_CHARS:
                break
    return head[:MAX_ERROR_CHARS]


def _refused_credentials(place: str, status: int, text: str) -> str:
    return f"{place} rejected the credentials (engine.api_key or other credentials) with {status}: {text}"


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
