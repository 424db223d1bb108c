"""The ledger's series of ``/metrics``: those whose source, the queue server or SQL, answers a gateway at once."""

import asyncio
from collections.abc import Sequence

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from db.set_aside import SetAside
from ledger.waiting import parked_messages, unwritten_messages
from protocol.bus import Bus


async def ledger_families(bus: Bus, set_aside: SetAside) -> Sequence[Metric]:
    """Return the series whose source has answered."""
    backlog, parked, counts = await asyncio.gather(unwritten_messages(bus), parked_messages(bus), set_aside.counts())
    families: list[Metric] = []
    if backlog is not None:
        meaning = "Messages of usage records that are not in SQL yet, of all gateways and workers."
        families.append(GaugeMetricFamily("spillway_ledger_backlog_messages", meaning, value=backlog))
    if parked is not None:
        meaning = "Usage records that no ledger writer could store: `spillway parked` tells why."
        families.append(GaugeMetricFamily("spillway_parked_usage_records", meaning, value=parked))
    if counts is not None:
        meaning = "What was set aside, the newest 1,000 of each kind: the dashboard names each, with its reason."
        family = GaugeMetricFamily("spillway_set_aside_items", meaning, labels=("kind",))
        for kind, count in sorted(counts.items()):
            family.add_metric((kind,), count)
        families.append(family)
    return families
