"""The way to an inference server: streams asked of it by HTTP, their limits, and what becomes of its faults.

What a server does wrong is one of three: the request's own fault (RequestRejected: nobody tries again), this attempt's
(AttemptFailed: another pool continues), or the whole server's (``lost``: the worker leaves, its jobs go elsewhere).
What is asked and what the events mean is the caller's; what cuts a body into events is a ``Framing``.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import httpx
import msgspec

from engine.errors import RequestRejected
from pool_worker.engines.base import EngineDiedError
from pool_worker.engines.event_decoder import EventDecoder
from pool_worker.engines.framing import DONE, FRAMINGS, Framing, MalformedEvent, ServerFailure
from pool_worker.engines.reported_errors import failure_in
from pool_worker.engines.server_client import OPENAI_PATHS, client_of, final_advice, shown
from pool_worker.settings import ConnectionSettings
from pool_worker.sidecar.readiness import Readiness
from protocol.backoff import wait_for
from protocol.wire import UNDECODABLE

HEALTH_PERIOD_S: Final = 1.0
PAGE_LIMIT_S: Final = 5.0
PAGE_LIMIT_BYTES: Final = 4 * 1024 * 1024
BUSY_WAIT_S: Final = 1.0  # after a 429 or 503 without a Retry-After
MAX_BUSY_WAIT_S: Final = 10.0
BUSY_TRIES: Final = 3  # of one stream, before the gateway looks for another pool
RETRY_SHARE: Final = 0.2  # of all streams: how many may be asked for again, so that retries cannot amplify an overload
MAX_RETRIES_SAVED: Final = 10.0
MAX_ERROR_CHARS: Final = 500
BUSY_STATUSES: Final = frozenset({429, 503, 529})
CREDENTIAL_STATUSES: Final = frozenset({401, 403})
REFUSED_STATUSES: Final = frozenset({400, 413, 422})  # about this request; all others are about the server or its key

log = logging.getLogger(__name__)

_HEADERS: Final = {"content-type": "application/json", "accept": "text/event-stream, application/x-ndjson"}
_decode = msgspec.json.Decoder(dict[str, Any]).decode

Meant = Callable[[int, Mapping[str, str], str], int]  # an error's status, headers and the head of its body → its status


class AttemptFailed(Exception):
    """This server did not answer to the end; another may."""


class Answer(Protocol):
    """Takes what a server answers to one request."""

    @property
    def has_begun(self) -> bool:
        """True if something has come that the caller has seen."""
        ...

    def take(self, event: Mapping[str, Any]) -> bool:
        """Take an event; return whether that is all. Raises MalformedEvent or ServerFailure."""
        ...

    def done(self) -> bool:
        """Hear from the server that that was all; return whether it can be. Raises MalformedEvent."""
        ...


class ServerConnection:
    """Streams of one server, and its health. ``lose`` is called once with the reason why the server is lost."""

    def __init__(
        self,
        settings: ConnectionSettings,
        lose: Callable[[str], None],
        auth: httpx.Auth | None = None,
        meant: Meant = lambda status, _headers, _text: status,
        api_paths: Sequence[str] = OPENAI_PATHS,
    ) -> None:
        """Open nothing yet. ``auth`` signs what is sent, where an API key as a bearer token is not enough.

        ``api_paths`` are those that the settings' URL may end in. Raises EngineDiedError.
        """
        self._settings = settings
        self._lose = lose
        self._meant = meant
        timeout = httpx.Timeout(settings.silence_s, connect=settings.connect_s, pool=None)
        self._client = client_of(settings, api_paths=api_paths, auth=auth, timeout=timeout)
        self.place = shown(str(self._client.base_url))  # for people
        self._running = 0  # streams
        self._last_seen_s = 0.0  # monotonic clock: the last event of any stream
        self._retries = MAX_RETRIES_SAVED
        self._is_watched = False
        self._is_reachable = asyncio.Event()
        self._is_reachable.set()

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    # --- health -------------------------------------------------------------------------------------------------------

    async def wait_until_ready(self, health_path: str, facts_path: str | None = None) -> dict[str, Any]:
        """Return what a ready server answers at ``facts_path``, if it has one. Raises EngineDiedError."""
        wait = Readiness(self.place, self._settings.ready_s)
        while True:
            try:
                (await self._client.get(health_path)).raise_for_status()
                if facts_path is None:
                    return {}
                return _decode((await self._client.get(facts_path)).raise_for_status().content)
            except UNDECODABLE as error:
                raise EngineDiedError(f"{self.place}{facts_path} answers no JSON object: {error}") from error
            except httpx.HTTPError as error:
                self._raise_if_final(error)
                await wait.not_yet(_reason(error))

    async def check_credentials(self, path: str) -> None:
        """Post an empty request, to see whether the server would refuse any. Raises EngineDiedError.

        It costs nothing, and every API that we know judges the credentials first.
        """
        place = shown(self.place + path)
        try:
            async with (
                asyncio.timeout(self._settings.health_limit_s),
                self._client.stream("POST", path, content=b"{}", headers=_HEADERS) as response,
            ):
                text = (await _head_of(response)).decode(errors="replace")
                status = self._meant(response.status_code, response.headers, text)
        except (httpx.HTTPError, TimeoutError) as error:
            if isinstance(error, httpx.HTTPError):
                self._raise_if_final(error)
            log.warning("%s cannot be reached yet: %s", place, _reason(error))
            return
        if status in CREDENTIAL_STATUSES:
            raise EngineDiedError(_refused_credentials(place, status, text))
        if status == httpx.codes.NOT_FOUND:
            log.warning("%s answers 404; are engine.url and engine.model right? %s", place, text)

    def _raise_if_final(self, error: httpx.HTTPError) -> None:
        """Raise EngineDiedError for what no waiting changes."""
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in CREDENTIAL_STATUSES:
            place, text = shown(str(error.request.url)), error.response.text[:MAX_ERROR_CHARS]
            raise EngineDiedError(_refused_credentials(place, error.response.status_code, text)) from error
        advice = final_advice(error)
        if advice is not None:
            raise EngineDiedError(f"{self.place}: {_reason(error)}; {advice}") from error

    async def page(self, path: str) -> bytes:
        """Return what a ready server shows at ``path``; nothing where it shows nothing, or too much."""
        page = b""
        try:
            async with asyncio.timeout(PAGE_LIMIT_S), self._client.stream("GET", path) as response:
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
        """Ask for the server's health until it is lost."""
        healthy_s = time.monotonic()
        self._is_watched = True
        was_refused = False  # the last time
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            try:
                answer = await self._client.get(health_path, timeout=self._settings.health_limit_s)
                answer.raise_for_status()
            except httpx.HTTPError as error:
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
        """Post a body and hand over each event of the answer, until ``answer`` has all.

        A server that is too busy to begin is asked again, within limits. Raises RequestRejected and AttemptFailed;
        ``answer`` may raise MalformedEvent and ServerFailure, which become the latter.
        """
        try:
            await self._stream(path, body, framing, answer)
        except AttemptFailed as error:
            raise AttemptFailed(f"{shown(self.place + path)}: {error}") from error

    async def _stream(self, path: str, body: Mapping[str, Any], framing: Framing, answer: Answer) -> None:
        self._retries = min(MAX_RETRIES_SAVED, self._retries + RETRY_SHARE)
        content = msgspec.json.encode(body)
        if not self._running:
            self._last_seen_s = time.monotonic()
        self._running += 1
        try:
            for attempt in range(BUSY_TRIES):
                wait_s = await self._stream_once(path, content, framing, answer)
                if wait_s is None:
                    return
                if attempt + 1 == BUSY_TRIES or self._retries < 1:
                    break
                self._retries -= 1
                await asyncio.sleep(wait_s)
        finally:
            self._running -= 1
        raise AttemptFailed("the server is busy")

    async def _stream_once(self, path: str, content: bytes, framing: Framing, answer: Answer) -> float | None:
        """Read one stream; return how long to wait where the server is too busy to begin one."""
        try:
            async with self._client.stream("POST", path, content=content, headers=_HEADERS) as response:
                if response.status_code != httpx.codes.OK:
                    return await self._refused(response)
                if await self._has_all(response, framing, answer):
                    return None  # the connection is closed, which tells the server to stop
        except httpx.ConnectError as error:
            if await self._is_there_again():
                return 0.0
            raise AttemptFailed(f"the server cannot be reached: {_reason(error)}") from error
        except ServerFailure as failure:
            if failure.status is not None and not answer.has_begun:
                return self._judged(failure.status, str(failure)[:MAX_ERROR_CHARS])
            raise AttemptFailed(self._fault(failure)) from failure
        except (MalformedEvent, *UNDECODABLE, httpx.HTTPError) as error:
            raise AttemptFailed(self._fault(error)) from error
        raise AttemptFailed("the server's answer has no end")

    async def _has_all(self, response: httpx.Response, framing: Framing, answer: Answer) -> bool:
        """Hand over the events of a stream; return False if it ends before the answer does."""
        reading, events = _Reading(response, self._settings.silence_s), EventDecoder()
        async for data in FRAMINGS[framing](reading.chunks()):
            self._last_seen_s = reading.event_s = time.monotonic()
            if data == DONE:
                return answer.done()
            event = events.read(data)
            failure = failure_in(event)
            if failure is not None:
                raise failure
            if answer.take(event):
                return True
        return False

    async def _refused(self, response: httpx.Response) -> float:
        """Return how long to wait for a busy server. Raises RequestRejected or AttemptFailed for all else."""
        text = (await _head_of(response)).decode(errors="replace")
        status = self._meant(response.status_code, response.headers, text)
        return self._judged(status, text, response.headers.get("retry-after", ""))

    @staticmethod
    def _judged(status: int, text: str, retry_after: str = "") -> float:
        """Return how long to wait for a busy server. Raises RequestRejected or AttemptFailed for all else."""
        if status in BUSY_STATUSES:
            with contextlib.suppress(ValueError):
                return min(MAX_BUSY_WAIT_S, max(0.0, float(retry_after)))
            return BUSY_WAIT_S
        if status in REFUSED_STATUSES:
            raise RequestRejected("model", f"this pool's server refused the request: {text}")
        raise AttemptFailed(f"the server answered {status}: {text}")

    def _fault(self, error: Exception) -> str:
        """Say what went wrong with one stream; where that is all of the server's, it is lost."""
        if isinstance(error, ServerFailure):
            return f"the server failed: {str(error)[:MAX_ERROR_CHARS]}"
        if isinstance(error, httpx.ReadTimeout):
            if (
                time.monotonic() - self._last_seen_s >= self._settings.silence_s
            ):  # and none of its other streams says more
                self._lose("it is healthy, and makes no tokens")
            return f"the server was silent for {self._settings.silence_s:g} s"
        if isinstance(error, httpx.HTTPError):
            return f"the connection to the server broke: {_reason(error)}"
        return f"the server's answer is malformed: {error}"

    async def _is_there_again(self) -> bool:
        """Wait for the watch's word: who failed at once where nobody listens would swallow the whole queue."""
        if not self._is_watched:
            return False
        self._is_reachable.clear()
        return await wait_for(self._is_reachable, self._settings.health_limit_s)


@dataclass(slots=True)
class _Reading:
    """One stream's body. Bytes that make no event are silence: a server may send one at a time for ever."""

    response: httpx.Response
    silence_s: float
    event_s: float = field(default_factory=time.monotonic)  # the last one

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield what comes. Raises ReadTimeout."""
        async for chunk in self.response.aiter_bytes():
            if time.monotonic() - self.event_s > self.silence_s and b"\n" not in chunk:
                raise httpx.ReadTimeout("bytes that make no event")
            yield chunk


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
    return f"{place} refuses the credentials (engine.api_key or what stands for it): it answered {status}: {text}"


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
