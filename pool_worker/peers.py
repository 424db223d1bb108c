"""The other workers as this worker sees them, from their heartbeats and the server's reports of lost connections."""

import itertools
import logging
import time
from asyncio import sleep
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from nats.aio.msg import Msg

from pool_worker.executor import Executor
from pool_worker.settings import WorkerSettings
from protocol import subjects
from protocol.errors import BusError, ProtocolError
from protocol.gateways import decode_disconnect
from protocol.job import PROTOCOL_VERSION, Heartbeat, StepFrame, decode_heartbeat, encode
from protocol.nats.bus import Bus
from protocol.nats.topology import HEARTBEAT_LIMIT_S, HEARTBEAT_PERIOD_S, PULL_PRIORITIES

log = logging.getLogger(__name__)


# --- gateway watch ----------------------------------------------------------------------------------------------------
#
# Detects gateways that are gone: the tokens of their requests have no reader, so their attempts are stopped.
#
# A gateway listens for frames throughout its life, and the server tells a sender that a message has no listener. Each
# gateway is therefore probed with an empty step frame. It does not answer; only the server's "no responders" returns.

GONE_AFTER_PROBES: Final = 3  # in a row, without a listener


@dataclass(slots=True)
class _Missing:
    """A gateway that did not listen at any of the last probes."""

    since_s: float  # monotonic clock
    probes: int = 0


class GatewayWatch:
    """Ends the attempts of gateways that are permanently gone."""

    def __init__(self, bus: Bus, settings: WorkerSettings, executor: Executor) -> None:
        self._bus = bus
        self._settings = settings
        self._executor = executor
        self._probe = encode(StepFrame(PROTOCOL_VERSION, settings.worker_id, ()))
        self._inbox = bus.client.new_inbox()
        self._numbers = itertools.count(1)
        self._probed: dict[str, str] = {}  # probe number, in this round → reply subject
        self._missed: set[str] = set()  # reply subjects without a listener in this round
        self._missing: dict[str, _Missing] = {}

    async def run(self) -> None:
        """Watch until canceled."""
        await self._bus.subscribe(f"{self._inbox}.*", self._on_reply)
        self._bus.on_reconnect(self._forget)
        while True:
            await sleep(self._settings.gateway_probe_period_s)
            try:
                await self._probe_all()
            except BusError as error:
                log.warning("cannot probe gateways: %s", error)
                await self._forget()

    async def _probe_all(self) -> None:
        gateways = {attempt.job.reply_subject for attempt in self._executor.held}
        self._missing = {gateway: self._missing[gateway] for gateway in self._missed & gateways}
        self._missed.clear()
        self._probed.clear()
        if not self._bus.connected:  # the worker itself was disconnected
            await self._forget()
            return
        for gateway in gateways:
            number = str(next(self._numbers))
            self._probed[number] = gateway
            await self._bus.publish(gateway, self._probe, reply=f"{self._inbox}.{number}")

    async def _on_reply(self, message: Msg) -> None:
        gateway = self._probed.pop(message.subject.rpartition(".")[2], None)
        if gateway is None or (message.headers or {}).get("Status") != "503":
            return
        self._missed.add(gateway)
        missing = self._missing.setdefault(gateway, _Missing(time.monotonic()))
        missing.probes += 1
        missing_s = time.monotonic() - missing.since_s
        if missing.probes >= GONE_AFTER_PROBES and missing_s >= self._settings.gateway_gone_after_s:
            self._executor.abandon(gateway)

    async def _forget(self) -> None:
        """Start over: observations from before a reconnect prove nothing."""
        self._probed.clear()
        self._missed.clear()
        self._missing.clear()


# --- peers ------------------------------------------------------------------------------------------------------------

INFORMED_AFTER_S: Final = 1.5 * HEARTBEAT_PERIOD_S  # by then every live worker's heartbeat has arrived


class Peers:
    """The models that others serve. A worker that drains, pauses, left or is silent for ``silence_s`` serves none."""

    def __init__(
        self,
        bus: Bus,
        worker_id: str,
        *,
        hosted_pool: str | None = None,
        trusted: bool = False,
        silence_s: float = HEARTBEAT_LIMIT_S,
    ) -> None:
        """Make an empty view; ``worker_id`` is this worker, which is not a peer.

        A hosted pool serves only its own lanes, so its peers are the workers of ``hosted_pool``. Likewise only
        ``trusted`` workers take jobs that demand trusted pools, and they take no others.
        """
        self._bus = bus
        self._worker_id = worker_id
        self._hosted_pool = hosted_pool
        self._trusted = trusted
        self._silence_s = silence_s
        self._peers: dict[str, Heartbeat] = {}  # all of them take jobs
        self._last_seen_s: dict[str, float] = {}  # monotonic clock
        self._listening_since_s = 0.0
        self._on_change: list[Callable[[], None]] = []
        bus.on_reconnect(self._on_reconnected)

    async def start(self) -> None:
        """Listen. Raises BusError."""
        self._listening_since_s = time.monotonic()
        await self._bus.subscribe(subjects.HEARTBEATS, self._on_heartbeat)
        await self._bus.subscribe(subjects.DISCONNECTS, self._on_disconnect)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when a worker joins, leaves or starts to drain, but not when one falls silent."""
        self._on_change.append(callback)

    @property
    def is_informed(self) -> bool:
        """True once it has listened long enough to have received every worker's heartbeat."""
        return time.monotonic() - self._listening_since_s >= INFORMED_AFTER_S

    def others_serving(self, model: str, revision: str = "") -> bool:
        """Report whether another worker, of any tier, can take jobs of this model; with these weights, if named."""
        return any(_serves(peer, model, revision) for peer in self._of_same_lanes())

    def others_reading(self, model: str, tokenizer: str) -> bool:
        """Report whether another worker that serves this model has this tokenizer."""
        peers = [peer.revisions[model] for peer in self._of_same_lanes() if model in peer.revisions]
        return any(revision.tokenizer == tokenizer for revision in peers)

    def start_tpots_ms(self, pool: str) -> list[float]:
        """Return the TPOT that the other workers of a pool measured at their start."""
        paces = [peer.pace for peer in self._live() if peer.pool == pool and peer.pace is not None]
        return [pace.tpot_ms for pace in paces if pace.tpot_ms]

    def cheaper_serving(self, model: str, tier: str) -> bool:
        """Report whether a worker of a cheaper tier than ``tier`` can take jobs of this model."""
        priority = PULL_PRIORITIES[tier]
        return any(model in peer.models and PULL_PRIORITIES[peer.tier] < priority for peer in self._of_same_lanes())

    def _of_same_lanes(self) -> list[Heartbeat]:
        """Return the peers that serve the same lanes as this worker."""
        return [
            peer
            for peer in self._live()
            if peer.trusted == self._trusted
            and self._hosted_pool == (peer.pool if peer.tier == subjects.HOSTED_TIER else None)
        ]

    def _live(self) -> list[Heartbeat]:
        oldest_s = time.monotonic() - self._silence_s
        for worker_id in [id_ for id_, last_seen_s in self._last_seen_s.items() if last_seen_s < oldest_s]:
            self._forget(worker_id)
        return list(self._peers.values())

    def _forget(self, worker_id: str) -> bool:
        self._last_seen_s.pop(worker_id, None)
        return self._peers.pop(worker_id, None) is not None

    async def _on_heartbeat(self, message: Msg) -> None:
        worker_id = subjects.worker_of_heartbeat(message.subject)
        if worker_id == self._worker_id or "Status" in (message.headers or {}):  # the server's reply to another client
            return
        heartbeat = _read(message)
        if heartbeat is None or not heartbeat.takes_jobs or heartbeat.tier not in PULL_PRIORITIES:
            has_changed = self._forget(worker_id)
        else:
            has_changed = worker_id not in self._peers
            self._peers[worker_id] = heartbeat
            self._last_seen_s[worker_id] = time.monotonic()
        if has_changed:
            self._notify()

    async def _on_disconnect(self, message: Msg) -> None:
        try:
            event = decode_disconnect(message.data)
        except ProtocolError as error:
            log.warning("%s", error)
            return
        if event is not None and self._forget(event.worker_id):
            self._notify()

    async def _on_reconnected(self) -> None:
        # Silence proves nothing while this worker was disconnected.
        self._listening_since_s = time.monotonic()

    def _notify(self) -> None:
        for callback in self._on_change:
            callback()


def _serves(peer: Heartbeat, model: str, revision: str) -> bool:
    reported = peer.revisions[model].weights if model in peer.revisions else ""  # an older worker states no revision
    return model in peer.models and (not (revision and reported) or revision == reported)


def _read(message: Msg) -> Heartbeat | None:
    """Decode; None if the entry was removed, is of another protocol version, or names another worker."""
    sender = subjects.worker_of_heartbeat(message.subject)
    try:
        return decode_heartbeat(message.data, sender) if message.data else None
    except ProtocolError as error:
        log.warning("cannot decode the heartbeat on %s: %s", message.subject, error)
        return None
