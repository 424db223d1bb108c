"""The ledger's series of ``/metrics``. A series is omitted if its source, the queue server or SQL, does not answer."""

import asyncio
from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from db.set_aside import SetAside
from ledger.waiting import parked_messages, unwritten_messages
from protocol.nats.bus import Bus


async def read_ledger(bus: Bus, set_aside: SetAside) -> Iterator[Metric]:
    """Return the current series."""
    found = await asyncio.gather(unwritten_messages(bus), parked_messages(bus), set_aside.counts())
    return ledger_families(*found)


def ledger_families(backlog: int | None, parked: int | None, set_aside: Mapping[str, int] | None) -> Iterator[Metric]:
    """Yield the series: messages that are not in SQL, records that are parked, and items set aside, by kind.

    None: the source has not answered, and the series is omitted.
    """
    if backlog is not None:
        meaning = "Messages of usage records that are not in SQL yet, of all gateways and workers."
        yield GaugeMetricFamily("spillway_ledger_backlog_messages", meaning, value=backlog)
    if parked is not None:
        meaning = "Usage records that no ledger writer could store. `spillway parked` lists the reasons."
        yield GaugeMetricFamily("spillway_parked_usage_records", meaning, value=parked)
    if set_aside is not None:
        meaning = "Items set aside, at most 1,000 per kind. The dashboard lists each with its reason."
        family = GaugeMetricFamily("spillway_set_aside_items", meaning, labels=("kind",))
        for kind, count in sorted(set_aside.items()):
            family.add_metric((kind,), count)
        yield family
