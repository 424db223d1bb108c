"""Requests with an ``Idempotency-Key``.

The first request with a key runs independently of its connection, into a recording. All requests with the key read
the recording from its first byte. After a broken connection, a client repeats the request and gets the whole answer.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final

from msgspec import Struct

from db.accounts.keyring import KeyRing
from db.accounts.principal import Principal
from gateway.api.errors import AnswerStyle
from gateway.endpoints.endpoint import Endpoint, ReadBody
from gateway.errors import (
    AnswerNotKept,
    ClientDisconnected,
    IdempotencyKeyBusy,
    IdempotencyKeyReused,
    InvalidParameter,
    Refused,
)
from gateway.http.exchange import ClientExchange, Exchange, Head
from gateway.idempotency.claims import Claims
from gateway.idempotency.runs import Run, Runs
from gateway.idempotency.sharing import AnswerServer, OwnerNotFound, OwnerUnresponsive, ask, claim_state_of, part_of
from gateway.settings import GatewaySettings
from protocol.gateways import AnswerPartRequest, ClaimState, Part
from protocol.nats.bus import Bus
from protocol.process import calling_once

IDEMPOTENCY_KEY: Final = b"idempotency-key"
STANDING_HEADER: Final = b"x-spillway-idempotent"
MAX_KEY_CHARS: Final = 255
MAX_TAKES: Final = 5  # attempts if the claim changes concurrently
SLOW_READER_LIMIT_S: Final = 30.0  # maximum time to read one part (protocol.gateways.MAX_PART_BYTES)

log = logging.getLogger(__name__)

NextPart = Callable[[int], Awaitable[Part]]


class KeyedRequest(Struct, frozen=True):
    """A request with its idempotency key."""

    name: str  # hash of the key and its tenant, as other gateways see it
    fingerprint: str  # hash of path and body
    head: Head
    body: bytes
    style: AnswerStyle | None

    async def read(self, principal: Principal) -> bytes:
        """Return the body."""
        del principal
        return self.body


class RecordedReply:
    """A reply into a run's recording. The client counts as disconnected after too long without a reader."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def has_reader(self) -> bool:
        """Implement ``Reply``."""
        return self._run.readers > 0

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Implement ``Reply``; never wait."""
        self._run.recording.start(status, headers)

    async def write(self, body: bytes, *, more: bool) -> None:
        """Implement ``Reply``; never wait."""
        self._run.recording.write(body, more=more)

    def abort(self) -> None:
        """Implement ``Reply``: the recording stays incomplete."""

    def on_disconnect(self, callback: Callable[[], object]) -> AbstractContextManager[None]:
        """Implement ``Reply``."""
        return calling_once(self._run.abandoned, callback)


Answer = Callable[[Exchange, ReadBody], Awaitable[None]]


class KeyedRequests:
    """Finds or starts the run of each request with a key, and sends its answer."""

    def __init__(self, bus: Bus, settings: GatewaySettings, keys: KeyRing) -> None:
        self._bus = bus
        self._keys = keys
        self._gateway_id = settings.gateway_id
        self._timeouts = settings.timeouts
        self._claims = Claims(bus, settings.gateway_id)
        self._runs = Runs(settings.idempotency, self._claims.release)
        self._server = AnswerServer(bus, settings.gateway_id, self._runs)
        self._running: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start answering queries of other gateways. Raises BusError."""
        await self._server.start()
        self._bus.on_reconnect(self._claim_again)

    async def _claim_again(self) -> None:
        # The queue server may have lost the bucket: its sequence numbers then restart, and the old ones refer to
        # other claims. Or a key arrived while the server was unavailable.
        for run in self._runs:
            run.claim_sequence = None
        for run in list(self._runs):
            claim = await self._claims.take(run.name, run.fingerprint, over=None)
            if claim is not None and claim.gateway_id == self._gateway_id and claim.sequence is not None:
                self._runs.claimed(run, claim.sequence)

    async def serve(self, exchange: ClientExchange, endpoint: Endpoint[Any]) -> None:
        """Answer a request with a key. The endpoint runs it if no gateway has the answer."""
        await self._serve(exchange, endpoint)
        endpoint.note_refusal(exchange)

    async def _serve(self, exchange: ClientExchange, endpoint: Endpoint[Any]) -> None:
        try:
            question = await self._question(exchange, endpoint)
            await exchange.while_connected(self._answer(exchange, question, endpoint.answer))
        except Refused as error:
            await exchange.answer_error(error)
        except ClientDisconnected:
            return
        except Exception:
            log.exception("a request with an idempotency key failed")
            if exchange.sent_status is None:
                await exchange.answer_error(Refused())

    async def _question(self, exchange: ClientExchange, endpoint: Endpoint[Any]) -> KeyedRequest:
        principal = exchange.authenticate(self._keys)
        key = exchange.headers[IDEMPOTENCY_KEY].decode("latin-1")
        if not key or len(key) > MAX_KEY_CHARS or not (key.isascii() and key.isprintable()):
            raise InvalidParameter(
                f"The Idempotency-Key header must have 1 to {MAX_KEY_CHARS} printable ASCII characters.",
                param="Idempotency-Key",
            )
        body = await endpoint.read_body(exchange, principal)
        return KeyedRequest(
            name=_digest(principal.key_id.encode(), key.encode()),
            fingerprint=_digest(exchange.head.path.encode(), body),
            head=exchange.head,
            body=body,
            style=exchange.style,
        )

    async def _answer(self, exchange: Exchange, question: KeyedRequest, answer: Answer) -> None:
        over: int | None = None  # sequence of the claim that may be replaced
        for _ in range(MAX_TAKES):
            run = self._runs.find(question.name)
            if run is not None:
                await self._read(exchange, run, claim_state_of(run, question.fingerprint))
                return
            with self._runs.claiming(question.name):
                claim = await self._claims.take(question.name, question.fingerprint, over=over)
                if claim is not None and claim.is_new and self._runs.find(question.name) is None:
                    run = self._begin(question, claim.sequence, answer)
            if run is not None:
                await self._read(exchange, run, None)
                return
            over = claim.sequence if claim is not None else None
            if claim is not None and claim.gateway_id != self._gateway_id:
                try:
                    await self._read_from(claim.gateway_id, exchange, question)
                except OwnerNotFound:
                    continue
                return
        raise IdempotencyKeyBusy

    def _begin(self, question: KeyedRequest, claim_sequence: int | None, answer: Answer) -> Run:
        run = self._runs.begin(question.name, question.fingerprint, claim_sequence)
        exchange = Exchange(question.head, RecordedReply(run), self._timeouts, question.style)
        task = asyncio.create_task(self._run(run, answer(exchange, question.read)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return run

    async def _run(self, run: Run, answering: Awaitable[None]) -> None:
        try:
            await answering
        except Exception:
            log.exception("a run with an idempotency key failed")
        finally:
            self._runs.ended(run)

    async def _read(self, exchange: Exchange, run: Run, standing: ClaimState | None) -> None:
        """Send a run's answer. ``standing``: None for the client that started the run."""
        if standing is ClaimState.REUSED:
            raise IdempotencyKeyReused
        with run.reading():
            sure = standing or ClaimState.ATTACHED
            await _pass_on(exchange, lambda position: part_of(run, sure, position), is_first=standing is None)

    async def _read_from(self, gateway_id: str, exchange: Exchange, question: KeyedRequest) -> None:
        """Send another gateway's answer. Raises OwnerNotFound if nothing has been sent yet."""

        async def next_part(position: int) -> Part:
            return await ask(self._bus, gateway_id, AnswerPartRequest(question.name, question.fingerprint, position))

        try:
            await _pass_on(exchange, next_part, is_first=False)
        except OwnerUnresponsive as error:
            if exchange.sent_status is None:
                raise IdempotencyKeyBusy from error
        except OwnerNotFound:
            if exchange.sent_status is None:
                raise
        # otherwise the response stays incomplete and the connection is aborted; the client can retry


async def _pass_on(exchange: Exchange, next_part: NextPart, *, is_first: bool) -> None:
    """Send an answer in parts. It stays incomplete if the recording is."""
    position = 0
    while True:
        part = await next_part(position)
        if part.standing is ClaimState.REUSED:
            raise IdempotencyKeyReused
        if part.standing is ClaimState.NOT_KEPT:
            if exchange.sent_status is None:
                raise AnswerNotKept
            exchange.abort()
            return
        if part.status and exchange.sent_status is None:
            headers = () if is_first else ((STANDING_HEADER, part.standing.encode()),)
            await exchange.start_recorded(part.status, (*part.headers, *headers))
        position += len(part.body)
        if part.body or part.complete:
            try:
                async with asyncio.timeout(SLOW_READER_LIMIT_S):
                    await exchange.write(part.body, more=not part.complete)
            except TimeoutError:
                exchange.abort()
                return
        if part.ended:
            return


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
