"""The responses in the background of one gateway: those that it makes, and those that it takes over."""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final

import msgspec
from nats.aio.msg import Msg

from accounts.keyring import KeyRing
from accounts.principal import Principal
from protocol import subjects, wire
from protocol.backoff import backoff_s, wait_for
from protocol.bus import Bus
from protocol.clock import unix_now_ms
from protocol.errors import BusError, BusTimeout, NoResponders, ProtocolError
from response_store.patience import patiently
from response_store.records import Question, Run, decode_question, encode
from response_store.run import BackgroundRun, Lost, owned
from response_store.settings import ResponseSettings
from response_store.store import Key, NotKept, ResponseStore
from web.errors import ApiError, InvalidApiKey, LedgerUnavailable, RateLimitExceeded
from webhooks.events import EventType, publish_finished

ANSWER_LIMIT_S: Final = 1.0  # of another gateway that is asked what it makes
MAX_ASKED: Final = 1000  # responses in one question
LONGEST_WAIT_S: Final = 30.0  # between two tries to admit one that was taken over
FINISH_LIMIT_S: Final = 60.0
LEAVE_LIMIT_S: Final = 5.0
REST_S: Final = 5.0  # before a response is taken over again that could not be ended here
NOBODY: Final = ""
_AWAY: Final = (BusError, ProtocolError, NotKept)
_EVENTS: Final[dict[str, EventType]] = {
    "completed": "response.completed",
    "failed": "response.failed",
    "incomplete": "response.incomplete",
    "cancelled": "response.cancelled",
}
_names_decoder = msgspec.msgpack.Decoder(frozenset[str])

log = logging.getLogger(__name__)

Making = Callable[[], Awaitable[None]]
Admit = Callable[[BackgroundRun, Principal], Awaitable[Making]]  # raises ApiError


class _Ended(msgspec.Struct):
    status: str


class BackgroundRuns:
    """Run ``run`` as a supervised task."""

    def __init__(
        self,
        bus: Bus,
        store: ResponseStore,
        keys: KeyRing,
        settings: ResponseSettings,
        *,
        gateway_id: str,
        most: int,
        limit_s: float,
    ) -> None:
        """``most``: responses that are made here at a time; ``limit_s``: how long one may take in all."""
        self.admit: Admit | None = None  # set by the endpoint that makes them
        self._bus = bus
        self._store = store
        self._keys = keys
        self._settings = settings
        self._gateway_id = gateway_id
        self._most = most
        self._limit_s = limit_s
        self._running: dict[Key, BackgroundRun] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._owners: dict[Key, str] = {}  # of those that others make, as read once
        self._missed: dict[Key, float] = {}  # since when nobody has said that he makes it (monotonic clock)
        self._rests: dict[Key, float] = {}  # until when not to take them over (monotonic clock)
        self.is_leaving = False

    async def start(self) -> None:
        """Answer other gateways, and hear of what is to be cancelled. Raises BusError."""
        await self._bus.subscribe(subjects.runs_subject(self._gateway_id), self._on_question)
        await self._store.on_cancel(self._on_cancel)

    async def _on_question(self, message: Msg) -> None:
        try:
            asked = decode_question(message.data).response_ids
            mine = {key.response_id for key in self._running}
            await self._bus.publish(message.reply, encode([name for name in asked if name in mine]))
        except (ProtocolError, BusError) as error:  # it is asked again
            log.warning("another gateway's question was not answered: %s", error)

    def _on_cancel(self, key: Key) -> None:
        run = self._running.get(key)
        if run is not None:
            run.gone.set()

    # --- making -------------------------------------------------------------------------------------------------------

    def new(self, run: Run) -> BackgroundRun:
        """Return a response that this gateway is to make."""
        return BackgroundRun(self._store, run, self._gateway_id)

    async def begin(self, run: BackgroundRun, events: bytes) -> None:
        """Store a new response with its first events, as ours. Raises BusError and NotKept."""
        self._running[run.key] = run  # before others can ask
        try:
            await patiently(partial(self._store.begin, run.run))
            await patiently(partial(run.begin, events))
        except BaseException:
            del self._running[run.key]
            with contextlib.suppress(BusError):
                await self._store.delete(run.key)
            raise

    def make(self, run: BackgroundRun, making: Making) -> None:
        """Make a response, apart from whoever has asked for it."""
        self._running[run.key] = run
        task = self._tasks[run.key] = asyncio.create_task(self._make(run, making), name=run.key.response_id)
        task.add_done_callback(lambda _: self._forget(run.key))

    def _forget(self, key: Key) -> None:
        del self._running[key], self._tasks[key]

    async def _make(self, run: BackgroundRun, making: Making) -> None:
        try:
            await making()
            if run.response:
                await self._finish(run)
                return
        except (Lost, *_AWAY) as error:
            log.warning("%s is not ended here: %s", run.key.response_id, error or "another gateway goes on")
        except Exception:
            log.exception("%s failed in the background", run.key.response_id)
        self._rests[run.key] = time.monotonic() + REST_S

    async def _finish(self, run: BackgroundRun) -> None:
        """Store a response that has ended, and tell its team. Who dies in between leaves it to another gateway."""
        ended = msgspec.json.decode(run.response, type=_Ended)
        stored, ended_unix_s = run.stored(), unix_now_ms() // 1000

        async def finish() -> None:
            await self._store.put(run.key, stored)
            event, response_id = _EVENTS[ended.status], run.key.response_id
            await publish_finished(self._bus, run.run.team_id, event, response_id, created_unix_s=ended_unix_s)
            await self._store.forget_run(run.key)

        await patiently(finish, FINISH_LIMIT_S)

    # --- leaving ------------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Let other gateways go on with all of them."""
        self.is_leaving = True
        runs = list(self._running.values())
        for run in runs:
            run.stop()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=LEAVE_LIMIT_S)
        for run in runs:
            try:
                found = await self._store.run_of(run.key)
                if found is not None and found[0].owner == self._gateway_id:
                    await self._store.own(run.key, owned(found[0], NOBODY), found[1])
            except _AWAY as error:  # they will notice by themselves
                log.warning("%s could not be handed over: %s", run.key.response_id, error)

    # --- taking over --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look for responses whose gateways are gone; never returns."""
        while True:
            if not self.is_leaving and self._bus.connected:
                try:
                    await self._look()
                except _AWAY as error:
                    log.warning("it is not known which responses need another gateway: %s", error)
            await asyncio.sleep(self._settings.take_over_s)

    async def _look(self) -> None:
        others = [key for key in await self._store.running() if key not in self._running]
        self._owners = {key: self._owners.get(key) or await self._owner(key) for key in others}
        by_owner: dict[str, list[Key]] = defaultdict(list)
        for key, owner in self._owners.items():
            by_owner[owner].append(key)
        now_s, missed = time.monotonic(), {}
        self._rests = {key: until_s for key, until_s in self._rests.items() if until_s > now_s}
        for owner, keys in by_owner.items():
            for key, limit_s in await self._unmade(owner, keys):
                missed[key] = self._missed.get(key, now_s)
                is_due = now_s - missed[key] >= limit_s and key not in self._rests
                if is_due and len(self._running) < self._most:
                    await self._take_over(key, owner)
        self._missed = missed

    async def _owner(self, key: Key) -> str:
        found = await self._store.run_of(key)
        return NOBODY if found is None else found[0].owner

    async def _unmade(self, owner: str, keys: list[Key]) -> Iterable[tuple[Key, float]]:
        """Return which of an owner's responses it does not make, and for how long that must be so."""
        if owner in {NOBODY, self._gateway_id}:
            return [(key, 0.0) for key in keys]
        period_s, silence_s = self._settings.take_over_s, self._settings.silence_s
        asked = keys[:MAX_ASKED]
        question = encode(Question(tuple(key.response_id for key in asked)))
        try:
            reply = await self._bus.request(subjects.runs_subject(owner), question, timeout_s=ANSWER_LIMIT_S)
            made = wire.decode(_names_decoder, reply.data, "answer")
        except NoResponders:
            return [(key, 0.0) for key in asked]
        except BusTimeout:  # it may be frozen
            return [(key, silence_s) for key in asked]
        return [(key, period_s) for key in asked if key.response_id not in made]  # it may be about to end them

    async def _take_over(self, key: Key, owner: str) -> None:
        del self._owners[key]  # whoever it is from now on
        found = await self._store.run_of(key)
        if found is None or found[0].owner != owner:
            return
        stored, sequence = found
        if await self._store.own(key, owned(stored, self._gateway_id), sequence) is None:
            return
        log.warning("%s is made here from now on", key.response_id)
        run = self.new(owned(stored, self._gateway_id))
        self.make(run, lambda: self._go_on(run))

    async def _go_on(self, run: BackgroundRun) -> None:
        """Make the rest of a response that was taken over. Raises Lost, and what keeps it from being stored."""
        await self._claim(run)
        if run.response:
            return
        making = None if await self._store.is_cancelled(run.key) else await self._admitted_in_time(run)
        if making is not None:
            await making()
        elif run.is_handed_over:
            raise Lost
        elif not run.response:
            await run.end_unadmitted("cancelled")

    async def _claim(self, run: BackgroundRun) -> None:
        """Read what is there, and let nobody else add to it, unless it is complete."""
        while True:
            await run.read()
            if run.response:
                return
            try:
                await run.claim()
            except Lost:  # its gateway has added something meanwhile; the next claim keeps it from adding more
                continue
            return

    async def _admitted_in_time(self, run: BackgroundRun) -> Making | None:
        """Admit a response again; None: it has ended, or is to end."""
        for wait_s in backoff_s(LONGEST_WAIT_S):
            try:
                return await self._admitted(run)
            except ApiError as error:
                if self._is_final(run, error):
                    await run.end_unadmitted("failed", error)
                    return None
                log.info("%s waits: %s", run.key.response_id, error.message)
            if await wait_for(run.gone, wait_s):
                return None
        raise AssertionError("unreachable")

    async def _admitted(self, run: BackgroundRun) -> Making:
        """Admit a response again. Raises ApiError."""
        assert self.admit is not None  # noqa: S101  # its endpoint was made
        return await self.admit(run, self._principal(run.run))

    def _principal(self, run: Run) -> Principal:
        principal = self._keys.holder_of(run.key_id)
        if principal is not None and not principal.has_expired(unix_now_ms()):
            return principal
        if self._keys.may_be_old:
            raise LedgerUnavailable
        raise InvalidApiKey("The API key of this response is no longer accepted.")

    def _is_final(self, run: BackgroundRun, error: ApiError) -> bool:
        age_s = unix_now_ms() / 1000 - run.run.received_unix_ms / 1000
        if age_s >= self._limit_s:
            return True
        return error.status < 500 and error.status != RateLimitExceeded.status
