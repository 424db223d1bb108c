"""GET /metrics, for Prometheus."""

import asyncio
from collections.abc import Iterator

from fastapi import APIRouter, Request, Response

from db.accounts.principal import METRICS
from gateway.endpoints.services import Services
from gateway.http.exchange import exchange_of
from gateway.limits.leases import Quotas
from gateway.limits.prices import pool_of_account
from gateway.telemetry.exposition import MetricsSnapshot, exposition, read_fleet
from ledger.series import read_ledger


def metrics_router(services: Services) -> APIRouter:
    """Build the router for the metrics of the workers and this gateway. Open, or limited to the scope "metrics"."""
    router = APIRouter(tags=["metrics"])

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Return all metrics in the Prometheus text format or as OpenMetrics."""
        if not services.settings.open_metrics:
            exchange_of(request).authenticate(services.keys, METRICS)
        moment = await _moment(services)
        body, content_type = await exposition(moment, request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    return router


async def _moment(services: Services) -> MetricsSnapshot:
    ledger, fleet = await asyncio.gather(read_ledger(services.bus, services.set_aside), read_fleet(services.bus))
    dispatcher = services.dispatcher
    return MetricsSnapshot(
        counts=services.series.snapshot(),
        workers=dispatcher.live_workers(),
        models=services.catalog.models,
        queues=services.admission_control.queues,
        unusable_models=tuple(services.catalog.unusable),
        in_flight=dispatcher.in_flight,
        queued=tuple(services.admission_control.waiting_jobs()),
        oldest_waits_s=tuple(services.admission_control.oldest_waits_s()),
        is_bus_connected=services.bus.connected,
        clock_skew_s=round(services.bus.clock.skew_s, 3),
        unpublished_records=dispatcher.unpublished_records,
        spooled_bytes=dispatcher.spooled_bytes,
        payloads=dict(services.payloads.outcomes),
        fleet=fleet,
        further=(*ledger, *(metric for families in services.further_series for metric in families())),
        caps=tuple(_caps(services.quotas)),
    )


def _caps(quotas: Quotas) -> Iterator[tuple[str, str, int, int]]:
    for account_id, found in quotas.kept_uses().items():
        for use in found:
            yield pool_of_account(account_id), account_id.rpartition(":")[2], use.limit, use.used or 0
