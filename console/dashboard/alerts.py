"""Active alerts, from this gateway's memory, the ledger and the fleet's lease.

They share names with the alerts in ``deploy/prometheus/rules/alerts.yml`` that check the same condition. Prometheus
sees all gateways and waits until a condition has lasted. The dashboard shows it at once and needs no Prometheus.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard import formats
from console.dashboard.reader import Reader
from db.engine import describe
from gateway.errors import InsufficientQuota, LedgerUnavailable
from gateway.mount import GatewayParts
from ledger.queries.budgets import budget_paces
from ledger.queries.fleet import has_machines, leaked_machines
from ledger.queries.names import load_names
from ledger.queries.refusals import refusal_totals
from ledger.queries.set_aside import set_aside_counts
from ledger.queries.traffic import totals
from ledger.queries.window import HOUR_MS, MINUTE_MS, Window
from protocol import subjects
from protocol.errors import BusError
from protocol.nats.clock import WARN_S, unix_now_ms
from protocol.nats.lease import lease_holder

RECENT_MS: Final = 15 * MINUTE_MS  # of requests and refusals
LEAST_REQUESTS: Final = 20  # for a share of failed requests to be meaningful
MAX_FAILED_SHARE: Final = 0.05
MAX_REFUSED_SHARE: Final = 0.5
MAX_WAIT_S: Final = 60.0
MAX_NAMED: Final = 3  # of several keys, workers or machines in one text
KEPT_S: Final = 10.0  # for how long one look serves all viewers

log = logging.getLogger(__name__)

Severity = Literal["page", "ticket"]


@dataclass(frozen=True, slots=True)
class Alert:
    """One condition that holds now."""

    name: str
    severity: Severity  # "page": callers notice it now; "ticket": look at it today
    text: str
    advice: str
    path: str  # the page of the dashboard that shows more


class Alerts:
    """Finds the active alerts, at most once in KEPT_S. Used by the event loop only."""

    def __init__(self, gateway: GatewayParts, reader: Reader) -> None:
        self._gateway = gateway
        self._reader = reader
        self._looked_s = float("-inf")
        self._found: list[Alert] = []
        self._looking = asyncio.Lock()

    async def now(self) -> list[Alert]:
        """Return the active alerts, pages before tickets."""
        async with self._looking:
            if time.monotonic() - self._looked_s >= KEPT_S:
                found = [*live_alerts(self._gateway), *await self._of_ledger()]
                self._found = sorted(found, key=lambda alert: alert.severity != "page")
                self._looked_s = time.monotonic()
            return self._found

    async def _of_ledger(self) -> list[Alert]:
        try:
            found, has_machines = await self._reader.read(_ask_ledger)
        except (LedgerUnavailable, SQLAlchemyError, OSError) as error:
            log.warning("cannot look for alerts in the ledger: %s", describe(error))
            text = "The database does not answer. Gateways continue with the last known keys and limits."
            return [Alert("SpillwayLedgerUnavailable", "ticket", text, "Check the database.", "")]
        if has_machines and not await self._is_led():
            text = "The fleet has machines but no controller. No machine is started or ended."
            found.append(Alert("SpillwayControllerGone", "page", text, "Start one with: spillway fleet run", "/fleet"))
        return found

    async def _is_led(self) -> bool:
        try:
            return await lease_holder(self._gateway.bus, subjects.FLEET_BUCKET, "leader") is not None
        except BusError:
            return True  # unknown; SpillwayQueueServerLost is active


# --- this gateway's memory --------------------------------------------------------------------------------------------


def live_alerts(gateway: GatewayParts) -> Iterator[Alert]:
    """Find alerts in a gateway's memory."""
    if not gateway.bus.connected:
        text = "This gateway lost its connection to the queue server. Requests wait and streams stall."
        yield Alert(
            "SpillwayQueueServerLost", "page", text, "Check NATS, and the network between it and this machine.", ""
        )
    yield from _models_without_workers(gateway)
    waits = [(name, waited_s) for name, waited_s in gateway.admission_control.oldest_waits_s() if waited_s > MAX_WAIT_S]
    for name, waited_s in waits:
        text = f"A request for {name} has been waiting for {formats.duration(waited_s * 1000)}."
        yield Alert("SpillwayQueueOld", "page", text, "Add workers, or check those that run.", "/pools")
    yield from _workers(gateway)


def _models_without_workers(gateway: GatewayParts) -> Iterator[Alert]:
    served = {model for beat in gateway.dispatcher.live_workers() for model in beat.models}
    waiting: Counter[str] = Counter()
    for queue in gateway.admission_control.queues:
        waiting[subjects.model_of(queue)] += sum(gateway.admission_control.waiting_by_lane(queue).values())
    for model in sorted(gateway.catalog.models):
        if model in gateway.catalog.unusable:
            text = f"{model} cannot be served: {gateway.catalog.unusable[model]}."
            yield Alert(
                "SpillwayModelUnusable", "page", text, "Fix the model's files and restart its worker.", "/models"
            )
        elif model not in served and waiting[model]:
            text = f"{model} has no workers, and {formats.count(waiting[model])} requests wait for one."
            yield Alert("SpillwayModelStarves", "page", text, "Start a worker of a pool that serves it.", "/pools")
        elif model not in served:
            text = f"{model} is configured but has no workers."
            yield Alert(
                "SpillwayModelWithoutWorkers", "ticket", text, "Start a worker of a pool that serves it.", "/models"
            )


def _workers(gateway: GatewayParts) -> Iterator[Alert]:
    beats = gateway.dispatcher.live_workers()
    broken = [beat for beat in beats if beat.paused is not None and not beat.paused.wait_ms]
    for beat in broken[:MAX_NAMED]:
        reason = beat.paused.reason if beat.paused else ""
        text = f"{beat.worker_id} ({beat.pool}) accepts no requests: {reason[:200]}"
        yield Alert("SpillwayServerBroken", "ticket", text, "Restart its inference server or the worker.", "/pools")
    skew_s = gateway.bus.clock.skew_s
    if abs(skew_s) >= WARN_S:
        text = (
            f"This gateway's clock is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} the queue server's."
        )
        yield Alert("SpillwayGatewayClock", "ticket", text, "Check NTP on both machines.", "")


# --- the ledger -------------------------------------------------------------------------------------------------------


async def _ask_ledger(connection: AsyncConnection) -> tuple[list[Alert], bool]:
    """Return the ledger's alerts, and whether the fleet has machines."""
    return await ledger_alerts(connection, unix_now_ms()), await has_machines(connection)


async def ledger_alerts(connection: AsyncConnection, now_unix_ms: int) -> list[Alert]:
    """Find alerts in the ledger."""
    return [
        *await _of_requests(connection, now_unix_ms),
        *await _of_budgets(connection, now_unix_ms),
        *await _of_machines(connection, now_unix_ms),
        *await _of_set_aside(connection, now_unix_ms),
    ]


async def _of_requests(connection: AsyncConnection, now_unix_ms: int) -> list[Alert]:
    window = Window(now_unix_ms - RECENT_MS, now_unix_ms, grain_ms=MINUTE_MS)
    (sums,) = await totals(connection, window)
    refused = await refusal_totals(connection, window, by=("code", "key_id"))
    found: list[Alert] = []
    if sums.requests >= LEAST_REQUESTS and sums.failed > MAX_FAILED_SHARE * sums.requests:
        share = formats.share(sums.failed / sums.requests)
        text = f"{share} of {formats.count(sums.requests)} requests failed in the last 15 minutes."
        advice = "See the failed requests for their errors and workers."
        found.append(Alert("SpillwayRequestsFail", "page", text, advice, "/requests?range=15m&outcome=failed"))
    spent = {key: number for (code, key), number in refused.items() if code == InsufficientQuota.code}
    if spent:
        names = await load_names(connection)
        named = ", ".join(names.get(key, key) or "unknown key" for key in list(spent)[:MAX_NAMED])
        more = f" and {len(spent) - MAX_NAMED} more" if len(spent) > MAX_NAMED else ""
        number = formats.count(sum(spent.values()))
        text = f"A budget is used up. Refused requests of {named}{more} in the last 15 minutes: {number}."
        found.append(
            Alert("SpillwayBudgetSpent", "ticket", text, "Raise the budget, or wait for its next period.", "/keys")
        )
    others = sum(refused.values()) - sum(spent.values())
    if others >= LEAST_REQUESTS and others > MAX_REFUSED_SHARE * (others + sums.requests):
        numbers = f"{formats.count(others)} requests were refused and {formats.count(sums.requests)} admitted"
        text = f"{numbers} in the last 15 minutes."
        found.append(
            Alert("SpillwayRefused", "ticket", text, "See the refusals by code and caller.", "/refusals?range=15m")
        )
    return found


async def _of_budgets(connection: AsyncConnection, now_unix_ms: int) -> list[Alert]:
    paces = [(pace.lasts_ms, pace) for pace in await budget_paces(connection, now_unix_ms)]
    ending = [(lasts_ms, pace) for lasts_ms, pace in paces if lasts_ms is not None]
    if not ending:
        return []
    named = "; ".join(
        f"{pace.name} ({formats.money(pace.hour_nano_usd)} an hour, {formats.money(pace.budget_nano_usd)} a month:"
        f" spent in {formats.duration(lasts_ms)})"
        for lasts_ms, pace in sorted(ending, key=lambda one: one[0])[:MAX_NAMED]
    )
    more = f" and {len(ending) - MAX_NAMED} more" if len(ending) > MAX_NAMED else ""
    text = f"At the rate of the last hour, a monthly budget runs out before the month ends: {named}{more}."
    return [Alert("SpillwayBudgetPace", "ticket", text, "Raise the budget, or lower the limits of its keys.", "/keys")]


async def _of_machines(connection: AsyncConnection, now_unix_ms: int) -> list[Alert]:
    leaked = await leaked_machines(connection, now_unix_ms)
    if not leaked:
        return []
    named = ", ".join(f"{machine} ({pool})" for machine, pool in leaked[:MAX_NAMED])
    text = f"Machines that serve no requests but cost money: {formats.count(len(leaked))}. Among them: {named}."
    advice = "If the controller does not end them, end them at the provider."
    return [Alert("SpillwayMachineLeaked", "page", text, advice, "/fleet")]


async def _of_set_aside(connection: AsyncConnection, now_unix_ms: int) -> list[Alert]:
    counts = await set_aside_counts(connection, now_unix_ms - HOUR_MS, now_unix_ms)
    if not counts:
        return []
    text = f"{formats.count(sum(counts.values()))} items were set aside in the last hour: {', '.join(sorted(counts))}."
    return [Alert("SpillwayUsageParked", "ticket", text, "See the reason of each item.", "/set-aside?range=1h")]
