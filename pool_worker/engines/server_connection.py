"""The way to an inference server: streams asked of it by HTTP, their limits, and what becomes of its faults.

What a server does wrong is one of three: the request's own fault (RequestRejected: nobody tries again), this attempt's
(AttemptFailed: another pool continues), or the whole server's (``lost``: the worker leaves, its jobs go elsewhere). One
that is only too busy is no fault (ServerBusy: the request waits with others). Silence is counted in what is said of the
answer, not in bytes. What is asked and what the events mean is the caller's; a ``Framing`` cuts a body into events.
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
LONGEST_WAIT_HERE_S: Final = 0.25  # that a stream waits for a busy server; longer waits are for the queue
BUSY_TRIES: Final = 3  # of one stream, before it goes back to the queue
RETRY_SHARE: Final = 0.2  # of all streams: how many may be asked for again, so that retries cannot amplify an overload
MAX_RETRIES_SAVED: Final = 10.0
MAX_ERROR_CHARS: Final = 500
SILENCE_STEPS: Final = 20  # in a silence limit: so exactly it is kept, without a timer for each event
SILENCED_STREAMS: Final = 3  # in a row: a server is lost that says no more in so many
BUSY_STATUSES: Final = frozenset({429, 503, 529})
CREDENTIAL_STATUSES: Final = frozenset({401, 403})
REFUSED_STATUSES: Final = frozenset({400, 413, 422})  # about this request; all others are about the server or its key

log = logging.getLogger(__name__)

_HEADERS: Final = {"content-type": "application/json", "accept": "text/event-stream, application/x-ndjson"}
_decode = msgspec.json.Decoder(dict[str, Any]).decode

Meant = Callable[[int, Mapping[str, str], str], int]  # an error's status, headers and the head of its body → its status


class AttemptFailed(Exception):
    """This server did not answer to the end; another may."""


class Taken(enum.Enum):
    """What an event says of the answer."""

    NOTHING = enum.auto()  # as a comment does: it ends no silence
    SOME = enum.auto()
    ALL = enum.auto()  # nothing more is wanted


class Answer(Protocol):
    """Takes what a server answers to one request."""

    @property
    def has_begun(self) -> bool:
        """True if something has come that the caller has seen."""
        ...

    def take(self, event: Mapping[str, Any]) -> Taken:
        """Take an event. Raises MalformedEvent or ServerFailure."""
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
        *,
        is_ours: bool = False,
    ) -> None:
        """Open nothing yet. ``auth`` signs what is sent, where an API key as a bearer token is not enough.

        ``api_paths`` are those that the settings' URL may end in. ``is_ours``: the server is an inference engine of
        ours, which may hang; a hosted API is never lost for silence. Raises EngineDiedError.
        """
        self._settings = settings
        self._lose = lose
        self._meant = meant
        self._is_ours = is_ours
        timeout = httpx.Timeout(settings.silence_s, connect=settings.connect_s, pool=None)
        self._client = client_of(settings, api_paths=api_paths, auth=auth, timeout=timeout)
        self.place = shown(str(self._client.base_url))  # for people
        self._secrets = secrets_of(settings)
        self._prefilling = 0  # streams that have said nothing of their answer yet
        self._silenced = 0  # others, in a row, that have fallen silent
        self._retries = MAX_RETRIES_SAVED
        self._is_watched = False
        self._is_reachable = asyncio.Event()
        self._is_reachable.set()
        self.facts_watch: FactsWatch | None = None  # None: the server is not asked what it serves
        self._vouchers = 0  # streams that run, of a server that was the same when they began

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
            raise EngineDiedError(_refused_credentials(place, status, self._hidden(text)))
        if status == httpx.codes.NOT_FOUND:
            log.warning("%s answers 404; are engine.url and engine.model right? %s", place, self._hidden(text))

    def _raise_if_final(self, error: httpx.HTTPError) -> None:
        """Raise EngineDiedError for what no waiting changes."""
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in CREDENTIAL_STATUSES:
            place, text = shown(str(error.request.url)), error.response.text[:MAX_ERROR_CHARS]
            refused = _refused_credentials(place, error.response.status_code, self._hidden(text))
            raise EngineDiedError(refused) from error
        advice = final_advice(error)
        if advice is not None:
            raise EngineDiedError(f"{self.place}: {_reason(error)}; {advice}") from error

    async def facts(self, path: str, facts_of: Callable[[dict[str, Any]], ServerFacts]) -> ServerFacts:
        """Return what the server says of itself now. Raises FactsUnread."""
        page = await self.page(path)
        try:
            return facts_of(_decode(page))
        except (MalformedEvent, *UNDECODABLE) as error:
            raise FactsUnread(
                f"{self.place}{path}: {error}" if page else f"{self.place}{path} shows nothing"
            ) from error

    async def page(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Return what a ready server shows at ``path``, or to a body posted there; b"" for nothing, or too much."""
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
        """Post a body and hand over each event of the answer, until ``answer`` has all.

        A server that is too busy for a moment is asked again, within limits. Raises RequestRejected, AttemptFailed and
        ServerBusy; ``answer`` may raise MalformedEvent and ServerFailure, which become AttemptFailed.
        """
        try:
            await self._stream(path, body, framing, answer)
        except AttemptFailed as error:
            if error.__cause__ is None or isinstance(error.__cause__, httpx.TransportError):
                self._note_reconnect()  # it may have been started anew
            log.warning("%s: %s", shown(self.place + path), error)  # the error itself reaches callers
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
        """Read one stream; return what a server says that is too busy to begin one."""
        timeout = httpx.Timeout(None, connect=self._settings.connect_s)
        try:
            async with (
                self._checked() as doubt,
                self._limited_silence() as heard,
                self._client.stream("POST", path, content=content, headers=_HEADERS, timeout=timeout) as response,
            ):
                if (doubted := await doubt(response.status_code)) is not None:
                    return doubted
                if response.status_code != httpx.codes.OK:
                    return await self._refused(response)
                async for taken in self._taken(response, framing, answer):
                    if isinstance(taken, ServerBusy):
                        return taken
                    if taken is Taken.ALL:
                        return None  # the connection is closed, which tells the server to stop
                    if taken is Taken.SOME:
                        heard()
        except httpx.ConnectError as error:
            if await self._is_there_again():
                return ServerBusy("the server was away", 0.0)
            raise AttemptFailed(f"the server cannot be reached: {_reason(error)}") from error
        except (MalformedEvent, *UNDECODABLE, ServerFailure, httpx.HTTPError) as error:
            raise AttemptFailed(self._hidden(_fault(error))) from error
        raise AttemptFailed("the server's answer has no end")

    @contextlib.asynccontextmanager
    async def _checked(self) -> AsyncIterator[Callable[[int], Awaitable[ServerBusy | None]]]:
        """Read, while a stream begins, whether the server is the same, where no running stream vouches for that.

        What is yielded is asked before anything of an answer with that status is believed, and returns a reason not to.
        """
        watch, checking, is_voucher = self.facts_watch, None, False
        if watch is not None and not (watch.is_proved and self._vouchers):
            checking = asyncio.create_task(watch.check(), name="facts")

        async def doubt(status: int) -> ServerBusy | None:
            nonlocal is_voucher
            if checking is not None:
                await checking
            reason = None if watch is None else watch.doubt(is_answer=status == httpx.codes.OK)
            if reason is not None:
                return ServerBusy(reason, None)
            is_voucher = True
            self._vouchers += 1
            return None

        try:
            yield doubt
        finally:
            self._vouchers -= is_voucher
            if checking is not None:
                checking.cancel()
                await asyncio.gather(checking, return_exceptions=True)

    def _note_reconnect(self) -> None:
        if self.facts_watch is not None:
            self.facts_watch.reconnected()

    @contextlib.asynccontextmanager
    async def _limited_silence(self) -> AsyncIterator[Callable[[], None]]:
        """Limit how long a stream says nothing of its answer; what is yielded is called when it does."""
        silence_s, loop = self._settings.silence_s, asyncio.get_running_loop()
        heard_s: float | None = None  # when the limit was last set anew

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
        """Say that a stream is silent; where others that had begun are, too, a server that is ours is lost."""
        silence_s = self._settings.silence_s
        if not has_begun:
            return f"no token within {silence_s:g} s (engine.silence_s: raise it where long prompts take longer)"
        self._silenced += 1
        # A long prefill may hold up all other streams.
        if self._is_ours and self._silenced >= SILENCED_STREAMS and not self._prefilling:
            self._lose(f"it is healthy, and makes no tokens for {silence_s:g} s (engine.silence_s)")
        return f"the server was silent for {silence_s:g} s (engine.silence_s)"

    async def _taken(
        self, response: httpx.Response, framing: Framing, answer: Answer
    ) -> AsyncIterator[Taken | ServerBusy]:
        """Hand over the events of a stream, and yield what each says. Raises what ``answer`` and ``_judged`` raise."""
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
        """Return what a busy server says. Raises RequestRejected or AttemptFailed for all else."""
        text = (await _head_of(response)).decode(errors="replace")
        status = self._meant(response.status_code, response.headers, text)
        return _judged(status, self._hidden(text), response.headers)

    def _hidden(self, text: str) -> str:
        """Return what a server says without what it was sent: pages of errors repeat the request's head."""
        return hidden(text, self._secrets)

    async def _is_there_again(self) -> bool:
        """Wait for the watch's word: who failed at once where nobody listens would swallow the whole queue."""
        self._note_reconnect()
        if not self._is_watched:
            return False
        self._is_reachable.clear()
        return await wait_for(self._is_reachable, self._settings.health_limit_s)


def _judged(status: int, text: str, headers: Mapping[str, str]) -> ServerBusy:
    """Return what a busy server says. Raises RequestRejected or AttemptFailed for all else."""
    if status in BUSY_STATUSES:
        return ServerBusy(f"the server is busy: it answered {status}: {text}", asked_wait_s(headers, text, time.time()))
    if status in REFUSED_STATUSES:
        raise RequestRejected("model", f"this pool's server refused the request: {text}")
    raise AttemptFailed(f"the server answered {status}: {text}")


def _fault(error: Exception) -> str:
    """Say what went wrong with one stream."""
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
    return f"{place} refuses the credentials (engine.api_key or what stands for it): it answered {status}: {text}"


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
