"""The background responses that a gateway runs and takes over."""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from http import HTTPStatus
from typing import Final, Literal

import msgspec
from nats.aio.msg import Msg
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from db.accounts.keyring import KeyRing
from db.accounts.principal import Principal
from gateway.api.errors import form_of
from gateway.errors import InvalidApiKey, LedgerUnavailable, Refused
from gateway.responses.messages import Key, NotKept
from gateway.responses.run import MAX_REASON_CHARS, BackgroundRun, Lost, owned, tried
from gateway.responses.store import (
    HELD_FOR_EVENTS_BYTES,
    Question,
    ResponseStore,
    Run,
    decode_question,
    encode,
    retry_bus,
)
from gateway.settings import ResponseSettings
from protocol import subjects, wire
from protocol.errors import BusError, BusTimeout, NoResponders, ProtocolError
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms
from protocol.process import backoff_s, wait_for
from protocol.wire import UNDECODABLE

log = logging.getLogger(__name__)


# --- series -----------------------------------------------------------------------------------------------------------
#
# Metrics of background responses.


class RunSeries:
    """Counts since this gateway started. Use only from the event loop."""

    def __init__(self) -> None:
        self.running = 0  # running on this gateway
        self.unreadable = 0  # runs that this gateway cannot read
        self.taken_over = 0
        self.given_up = 0  # after too many failed attempts

    def families(self) -> Iterator[Metric]:
        """Return all metrics."""
        for name, meaning, value in (
            ("spillway_background_responses", "Background responses running on this gateway.", self.running),
            ("spillway_background_unreadable", "Background responses that cannot be read.", self.unreadable),
        ):
            yield GaugeMetricFamily(name, meaning, value=value)
        for name, meaning, count in (
            ("spillway_background_takeovers", "Background responses taken over from other gateways.", self.taken_over),
            ("spillway_background_given_up", "Background responses given up after too many failures.", self.given_up),
        ):
            yield CounterMetricFamily(name, meaning, value=count)


# --- runs -------------------------------------------------------------------------------------------------------------

ANSWER_LIMIT_S: Final = 1.0  # for queries to another gateway
MAX_ASKED: Final = 1000  # responses per query
LONGEST_WAIT_S: Final = 30.0  # between attempts to admit a response that was taken over
FINISH_LIMIT_S: Final = 60.0
LEAVE_LIMIT_S: Final = 5.0
MAX_TRIES: Final = 8  # lost gateways and failures after which a response is given up
UNREADABLE_REST_S: Final = 60.0  # before an unreadable run is read again
NO_OWNER: Final = ""
_AWAY: Final = (BusError, ProtocolError, NotKept)
_names_decoder = msgspec.msgpack.Decoder(frozenset[str])


Making = Callable[[], Awaitable[None]]
Note = Callable[[Literal["response"], str, str, str], None]  # kind, item, owner, reason
Finished = Callable[[str, str, str, int], Awaitable[None]]  # team, status, id, ended_unix_s; raises BusError
Admit = Callable[[BackgroundRun, Principal], Awaitable[Making]]  # raises Refused


class NotEnded(Exception):
    """The request has ended without a final event."""


class _Ended(msgspec.Struct):
    status: str


_decode_ended: Final = msgspec.json.Decoder(_Ended).decode


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
        set_aside: Note,
        finished: Finished,
    ) -> None:
        """``most``: maximum concurrent responses; ``limit_s``: time limit of one response.

        ``set_aside`` is called with responses that are given up; ``finished`` with each ended one, at least once.
        """
        self.admit: Admit | None = None  # set by the endpoint
        self._bus = bus
        self._store = store
        self._keys = keys
        self._settings = settings
        self._gateway_id = gateway_id
        self._most = most
        self._limit_s = limit_s
        self._set_aside = set_aside
        self._finished = finished
        self._running: dict[Key, BackgroundRun] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._owners: dict[Key, str] = {}  # owners of other gateways' responses, cached
        self._missed: dict[Key, float] = {}  # since when no gateway has reported running it (monotonic clock)
        self._rests: dict[Key, float] = {}  # earliest time to take over (monotonic clock)
        self._unreadable: dict[Key, float] = {}  # earliest time to read the run again (monotonic clock)
        self._unended: set[Key] = set()  # started by this process and not ended
        self.series = RunSeries()
        self.is_leaving = False

    async def start(self) -> None:
        """Start answering queries and receiving cancellations. Raises BusError."""
        await self._bus.subscribe(subjects.runs_subject(self._gateway_id), self._on_question)
        await self._store.on_cancel(self._on_cancel)

    async def _on_question(self, message: Msg) -> None:
        try:
            asked = decode_question(message.data).response_ids
            mine = {key.response_id for key in self._running}
            await self._bus.publish(message.reply, encode([name for name in asked if name in mine]))
        except (ProtocolError, BusError) as error:  # the query is repeated
            log.warning("a query from another gateway was not answered: %s", error)

    def _on_cancel(self, key: Key) -> None:
        run = self._running.get(key)
        if run is not None:
            run.gone.set()

    # --- making -------------------------------------------------------------------------------------------------------

    def new(self, run: Run) -> BackgroundRun:
        """Return a new run of this gateway."""
        return BackgroundRun(self._store, run, self._gateway_id)

    async def begin(self, run: BackgroundRun, events: bytes) -> None:
        """Store a new response of this gateway with its first events. On BusError or NotKept nothing is stored.

        If another gateway has already taken it over, it is marked as handed over.
        """
        self._running[run.key] = run  # before other gateways can ask
        try:
            run.run_bytes = await retry_bus(partial(self._store.begin, run.run))
            run.held_bytes = run.run_bytes + HELD_FOR_EVENTS_BYTES
            await retry_bus(partial(run.begin, events))
        except Lost:
            del self._running[run.key]
            run.stop()
        except BaseException:
            del self._running[run.key]
            with contextlib.suppress(BusError):
                await self._store.delete(run.key)
            raise

    def make(self, run: BackgroundRun, making: Making) -> None:
        """Run a response in a separate task."""
        self._running[run.key] = run
        self.series.running = len(self._running)
        task = self._tasks[run.key] = asyncio.create_task(self._make(run, making), name=run.key.response_id)
        task.add_done_callback(lambda _: self._forget(run.key))

    def _forget(self, key: Key) -> None:
        self._running.pop(key).forget_request()
        del self._tasks[key]
        self.series.running = len(self._running)

    async def _make(self, run: BackgroundRun, making: Making) -> None:
        self._unended.add(run.key)
        try:
            await making()
            if run.response:
                await self._finish(run)
                self._unended.discard(run.key)
                return
        except (Lost, BusError) as error:
            log.warning(
                "response %s did not end on this gateway: %s",
                run.key.response_id,
                str(error) or "another gateway continues it",
            )
            if run.problem is not None:
                await self._failed(run, run.problem)
        except (ProtocolError, NotKept) as error:
            await self._failed(run, error)
        except Exception as mistake:
            log.exception("background response %s failed", run.key.response_id)
            await self._failed(run, mistake)
        else:
            if run.problem is not None or not run.is_handed_over:
                await self._failed(run, run.problem or NotEnded())
        self._rests[run.key] = time.monotonic() + self._settings.retry_s

    async def _failed(self, run: BackgroundRun, mistake: Exception) -> None:
        """Release a response for another attempt, or give it up if it failed for the same reason before."""
        reason = f"{type(mistake).__name__}: {mistake}"[:MAX_REASON_CHARS]
        try:
            found = await self._store.run_of(run.key)
            if found is None or found[0].owner != self._gateway_id:
                return
            failed = tried(found[0], NO_OWNER, reason)
            if reason == found[0].reason or failed.tries >= MAX_TRIES:
                ending = self.new(failed)
                await self._give_up(ending, reason)
                await self._finish(ending)
            else:
                log.warning("retrying response %s: %s", run.key.response_id, reason)
                await self._store.own(run.key, failed, found[1])
            self._unended.discard(run.key)
        except (Lost, *_AWAY) as error:
            log.warning("response %s failed; checking it again: %s", run.key.response_id, error)

    async def _give_up(self, run: BackgroundRun, reason: str) -> None:
        """End a response as failed, in any state. Raises Lost and BusError."""
        tries = run.run.tries
        log.error("giving up response %s after %d attempts: %s", run.key.response_id, tries, reason)
        error = Refused(f"The response failed {tries} times and was given up.")
        self.series.given_up += 1
        self._set_aside("response", run.key.response_id, run.key.tenant, reason)
        try:
            await self._claim(run, with_frames=False)
            if not run.response:
                await run.end_unadmitted("failed", error)
        except (ProtocolError, NotKept) as broken:
            log.error("the events of response %s have no final event: %s", run.key.response_id, broken)  # noqa: TRY400
            run.end_without_events(error)

    async def _finish(self, run: BackgroundRun) -> None:
        """Store an ended response, and notify its team. After a crash in between, another gateway repeats this."""
        ended, ended_unix_s = _decode_ended(run.response), unix_now_ms() // 1000

        async def finish() -> None:
            await self._store_end(run)
            await self._finished(run.run.team_id, ended.status, run.key.response_id, ended_unix_s)
            await self._store.forget_run(run.key)

        await retry_bus(finish, FINISH_LIMIT_S)

    async def _store_end(self, run: BackgroundRun) -> None:
        """Store it with its conversation, or without it if that is too large or not JSON."""
        try:
            await self._store.end(run.key, await run.stored_apart(), run.events_bytes)
        except (NotKept, *UNDECODABLE) as error:
            log.warning("response %s is stored without its conversation: %s", run.key.response_id, error)
        else:
            return
        try:
            await self._store.end(run.key, run.stored(with_items=False), run.events_bytes)
        except NotKept as error:
            log.warning(
                "response %s is stored without the fields copied from its request: %s", run.key.response_id, error
            )
            run.forget_asked()
            await self._store.end(run.key, run.stored(with_items=False), run.events_bytes)

    # --- leaving ------------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Hand over all responses to other gateways."""
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
                    await self._store.own(run.key, owned(found[0], NO_OWNER), found[1])
            except _AWAY as error:  # other gateways detect it themselves
                log.warning("response %s could not be handed over: %s", run.key.response_id, error)

    # --- taking over --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take over responses of lost gateways; never return."""
        while True:
            if not self.is_leaving and self._bus.connected:
                try:
                    await self._look()
                except _AWAY as error:
                    log.warning("cannot determine which responses to take over: %s", error)
            await asyncio.sleep(self._settings.take_over_s)

    async def _look(self) -> None:
        others = [key for key in await self._store.running() if key not in self._running]
        self._unended.intersection_update({*others, *self._running})
        self._unreadable = {key: self._unreadable[key] for key in others if key in self._unreadable}
        owners = {key: self._owners.get(key) or await self._owner(key) for key in others}
        self._owners = {key: owner for key, owner in owners.items() if owner is not None}
        self.series.unreadable = len(self._unreadable)
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
                    await self._take_over_if_readable(key, owner)
        self._missed = missed

    async def _owner(self, key: Key) -> str | None:
        """Return the owner of a response; None: its run cannot be read here."""
        if self._unreadable.get(key, 0.0) > time.monotonic():
            return None
        try:
            found = await self._store.run_of(key)
        except ProtocolError as error:
            self._skip(key, error)
            return None
        self._unreadable.pop(key, None)
        return NO_OWNER if found is None else found[0].owner

    async def _unmade(self, owner: str, keys: list[Key]) -> Iterable[tuple[Key, float]]:
        """Return the responses that their owner does not run, and how long that must last before a takeover."""
        if owner in {NO_OWNER, self._gateway_id}:
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

    async def _take_over_if_readable(self, key: Key, owner: str) -> None:
        del self._owners[key]  # read the new owner next time
        try:
            await self._take_over(key, owner)
        except (ProtocolError, NotKept) as error:
            self._skip(key, error)

    def _skip(self, key: Key, error: Exception) -> None:
        """Skip an unreadable response: another gateway may have the key, or a newer build."""
        log.error("response %s cannot be taken over: %s", key.response_id, error)
        self._set_aside("response", key.response_id, key.tenant, f"cannot be read: {error}")
        self._unreadable[key] = time.monotonic() + UNREADABLE_REST_S

    async def _take_over(self, key: Key, owner: str) -> None:
        found = await self._store.run_of(key)
        if found is None or found[0].owner != owner:
            return
        stored, sequence = found
        # A response that this process itself has left unended has not lost a gateway.
        is_lost = owner != NO_OWNER and not (owner == self._gateway_id and key in self._unended)
        mine = tried(stored, self._gateway_id) if is_lost else owned(stored, self._gateway_id)
        placed = await self._store.own(key, mine, sequence)
        if placed is None:
            return
        self.series.taken_over += 1
        run = self.new(mine)
        run.run_bytes = placed.size_bytes
        if mine.tries >= MAX_TRIES:
            reason = mine.reason or "the gateways that ran it were lost"
            self.make(run, lambda: self._give_up(run, reason))
            return
        log.warning("response %s now runs on this gateway", key.response_id)
        self.make(run, lambda: self._go_on(run))

    async def _go_on(self, run: BackgroundRun) -> None:
        """Continue a response that was taken over. Raises Lost, and errors of storing it."""
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

    async def _claim(self, run: BackgroundRun, *, with_frames: bool = True) -> None:
        """Read the stored parts, and fence out other gateways unless the response is complete."""
        while True:
            await run.read(with_frames=with_frames)
            if run.response:
                return
            try:
                await run.claim()
            except Lost:  # its gateway added a part concurrently; the next claim fences it out
                continue
            return

    async def _admitted_in_time(self, run: BackgroundRun) -> Making | None:
        """Admit a response again; None: it has ended or must end."""
        for wait_s in backoff_s(LONGEST_WAIT_S):
            try:
                return await self._admitted(run)
            except Refused as error:
                if self._is_final(run, error):
                    await run.end_unadmitted("failed", error)
                    return None
                log.info("response %s is waiting: %s", run.key.response_id, error.message)
            if await wait_for(run.gone, wait_s):
                return None
        raise AssertionError("unreachable")

    async def _admitted(self, run: BackgroundRun) -> Making:
        """Admit a response again. Raises Refused."""
        assert self.admit is not None  # noqa: S101  # set with its endpoint
        return await self.admit(run, self._principal(run.run))

    def _principal(self, run: Run) -> Principal:
        principal = self._keys.holder_of(run.key_id)
        if principal is not None and not principal.has_expired(unix_now_ms()):
            return principal
        if self._keys.may_be_old:
            raise LedgerUnavailable
        raise InvalidApiKey("The API key of this response is no longer accepted.")

    def _is_final(self, run: BackgroundRun, error: Refused) -> bool:
        age_s = unix_now_ms() / 1000 - run.run.received_unix_ms / 1000
        if age_s >= self._limit_s:
            return True
        status = form_of(error).status
        return status < HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.TOO_MANY_REQUESTS
