"""Notices gateways that are gone: the tokens of their requests have no reader, so the engine's capacity goes to others.

A gateway listens for frames as long as it lives, and the server reports to the sender that a message has no listener.
So each gateway gets an empty step now and then, which it does not answer; only the server's "no responders" comes back.
"""

import itertools
import logging
import time
from asyncio import sleep
from dataclasses import dataclass
from typing import Final

from nats.aio.msg import Msg

from pool_worker.executor import Executor
from pool_worker.settings import WorkerSettings
from protocol.errors import BusError
from protocol.job import PROTOCOL_VERSION, StepFrame, encode
from protocol.nats.bus import Bus

GONE_AFTER_PROBES: Final = 3  # in a row, without a listener

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Missing:
    """A gateway that did not listen at any of the last probes."""

    since_s: float  # monotonic clock
    probes: int = 0


class GatewayWatch:
    """Ends the attempts of gateways that are gone permanently."""

    def __init__(self, bus: Bus, settings: WorkerSettings, executor: Executor) -> None:
        self._bus = bus
        self._settings = settings
        self._executor = executor
        self._probe = encode(StepFrame(PROTOCOL_VERSION, settings.worker_id, ()))
        self._inbox = bus.client.new_inbox()
        self._numbers = itertools.count(1)
        self._probed: dict[str, str] = {}  # number of a probe of this round → whom it went to
        self._missed: set[str] = set()  # of this round: those who did not listen
        self._missing: dict[str, _Missing] = {}

    async def run(self) -> None:
        """Watch for ever; cancel it to stop."""
        await self._bus.subscribe(f"{self._inbox}.*", self._on_reply)
        self._bus.on_reconnect(self._forget)
        while True:
            await sleep(self._settings.gateway_probe_period_s)
            try:
                await self._probe_all()
            except BusError as error:
                log.warning("gateways cannot be looked for: %s", error)
                await self._forget()

    async def _probe_all(self) -> None:
        gateways = {attempt.job.reply_subject for attempt in self._executor.held}
        self._missing = {gateway: self._missing[gateway] for gateway in self._missed & gateways}
        self._missed.clear()
        self._probed.clear()
        if not self._bus.connected:  # then it is we who are gone
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
        """Start over: nothing that was seen before a reconnect proves anything."""
        self._probed.clear()
        self._missed.clear()
        self._missing.clear()
