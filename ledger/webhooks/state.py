"""The state of webhooks: a ledger process publishes it over core NATS, gateways show it in their metrics."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Struct
from nats.aio.msg import Msg
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from db.engine import SQL_ERRORS, describe
from ledger.webhooks.deliveries import Deliveries
from protocol import subjects, wire
from protocol.errors import BusError, ProtocolError
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms
from protocol.process import wait_for

SILENT_MS: Final = 120_000  # without reports for this long, no process delivers

log = logging.getLogger(__name__)


class WebhookState(Struct, frozen=True):
    """The state in SQL, which is the same for all processes."""

    v: int
    sent_unix_ms: int
    totals: dict[str, int]  # ledger.webhooks.deliveries.Total → count
    waiting: int  # deliveries
    oldest_unix_ms: int | None  # when the oldest of them was created


_decoder = msgspec.json.Decoder(WebhookState)


class StateTeller:
    """Publishes the state until stopped."""

    def __init__(self, bus: Bus, deliveries: Deliveries, period_s: float, stopping: asyncio.Event) -> None:
        self._bus = bus
        self._deliveries = deliveries
        self._period_s = period_s
        self._stopping = stopping

    async def run(self) -> None:
        """Publish the state once a period, until ``stopping`` is set."""
        while not await wait_for(self._stopping, self._period_s):
            try:
                state = WebhookState(wire.PROTOCOL_VERSION, unix_now_ms(), *await self._deliveries.summary())
                await self._bus.publish(subjects.WEBHOOKS_STATE, msgspec.json.encode(state))
            except SQL_ERRORS as error:
                log.warning("cannot read the state of webhooks, will retry: %s", describe(error))
            except BusError as error:
                log.debug("cannot publish the state of webhooks: %s", error)


class StateView:
    """The last report."""

    def __init__(self) -> None:
        self._state: WebhookState | None = None

    async def start(self, bus: Bus) -> None:
        """Subscribe."""
        await bus.listen(subjects.WEBHOOKS_STATE, self._on_state)

    def _on_state(self, message: Msg) -> None:
        try:
            state = wire.decode_versioned(_decoder, message.data, "state of webhooks")
        except ProtocolError as error:
            log.debug("%s", error)
            return
        if self._state is None or state.sent_unix_ms > self._state.sent_unix_ms:
            self._state = state

    def families(self) -> Iterator[Metric]:
        """Return the series; none without recent reports."""
        state, now_unix_ms = self._state, unix_now_ms()
        if state is None or now_unix_ms - state.sent_unix_ms > SILENT_MS:
            return
        attempts = CounterMetricFamily(
            "spillway_webhooks",
            "Attempts that delivered a webhook or failed, deliveries given up, and events dropped as too many waited.",
            labels=("outcome",),
        )
        for outcome, count in state.totals.items():
            attempts.add_metric((outcome,), count)
        yield attempts
        yield GaugeMetricFamily("spillway_webhooks_waiting", "Deliveries that wait or are tried.", value=state.waiting)
        oldest_s = 0.0 if state.oldest_unix_ms is None else max(0.0, (now_unix_ms - state.oldest_unix_ms) / 1000)
        yield GaugeMetricFamily(
            "spillway_webhooks_oldest_seconds", "How long the oldest of them has been undelivered.", value=oldest_s
        )
