"""Reading answers from other gateways, and serving them to other gateways."""

import asyncio
import contextlib
import logging
from typing import Final

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from gateway.idempotency.recording import RecordingTruncated
from gateway.idempotency.runs import Run, Runs
from protocol import subjects
from protocol.errors import BusError, BusTimeout, NoResponders, ProtocolError
from protocol.gateways import PART_WAIT_S, AnswerPartRequest, ClaimState, Part, decode_ask, decode_part, encode
from protocol.nats.bus import Bus

MAX_QUESTIONS: Final = 1024  # pending queries; others are not answered, and are repeated
PART_LIMIT_S: Final = PART_WAIT_S + 1.0
CLAIMING_S: Final = 0.02  # maximum time between a claim and its run
MAX_SILENCES: Final = 3  # consecutive timeouts, after which the owner counts as frozen

log = logging.getLogger(__name__)


class OwnerUnresponsive(Exception):
    """The owner of the key is connected but does not answer. The request may still be running."""


class OwnerNotFound(Exception):
    """The owner of the key is gone, or has no run of the key."""


def claim_state_of(run: Run, fingerprint: str) -> ClaimState:
    """Return the state of a key's claim for a request with this fingerprint."""
    if run.fingerprint != fingerprint:
        return ClaimState.REUSED
    return ClaimState.REPLAYED if run.recording.ended else ClaimState.ATTACHED


async def part_of(run: Run, standing: ClaimState, position: int, *, wait_s: float | None = None) -> Part:
    """Return the answer from byte ``position``; empty if there is none within ``wait_s`` (None: no limit)."""
    recording = run.recording
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await recording.wait_for_more(position)
    try:
        body, last = recording.read(position)
    except RecordingTruncated:
        return Part(ClaimState.NOT_KEPT)
    status, headers = recording.head or (0, ())
    return Part(standing, status, headers, body, ended=last, complete=last and recording.complete)


class AnswerServer:
    """Serves this gateway's recordings to other gateways."""

    def __init__(self, bus: Bus, gateway_id: str, runs: Runs) -> None:
        self._bus = bus
        self._subject = subjects.answers_subject(gateway_id)
        self._runs = runs
        self._questions: set[asyncio.Task[None]] = set()
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Subscribe. Raises BusError."""
        self._subscription = await self._bus.subscribe(self._subject, self._on_question)

    async def _on_question(self, message: Msg) -> None:
        if len(self._questions) >= MAX_QUESTIONS:
            return
        try:
            question = decode_ask(message.data)
        except ProtocolError as error:
            log.warning("a query from another gateway was dropped: %s", error)
            return
        task = asyncio.create_task(self._answer(message.reply, question))
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    async def _answer(self, reply_subject: str, question: AnswerPartRequest) -> None:
        try:
            await self._bus.publish(reply_subject, encode(await self._part(question)))
        except BusError as error:  # the query is repeated
            log.debug("a part of an answer was not sent: %s", error)

    async def _part(self, question: AnswerPartRequest) -> Part:
        run = self._runs.find(question.name)
        if run is None and self._runs.is_claiming(question.name):
            await asyncio.sleep(CLAIMING_S)
            return Part(ClaimState.ATTACHED)  # nothing yet: repeat the query
        if run is None:
            return Part(ClaimState.UNKNOWN)
        standing = claim_state_of(run, question.fingerprint)
        if standing is ClaimState.REUSED:
            return Part(standing)
        with run.reading():
            return await part_of(run, standing, question.position, wait_s=PART_WAIT_S)


async def ask(bus: Bus, gateway_id: str, question: AnswerPartRequest) -> Part:
    """Fetch a part of an answer from its owner. Raises OwnerNotFound or OwnerUnresponsive."""
    for _ in range(MAX_SILENCES):
        try:
            reply = await bus.request(subjects.answers_subject(gateway_id), encode(question), timeout_s=PART_LIMIT_S)
            part = decode_part(reply.data)
        except NoResponders as error:
            raise OwnerNotFound from error
        except BusTimeout:
            continue
        except (BusError, ProtocolError) as error:
            raise OwnerUnresponsive from error
        if part.standing is ClaimState.UNKNOWN:
            raise OwnerNotFound
        return part
    raise OwnerUnresponsive
