"""The fleet's series, from what its controller last told."""

import asyncio
import base64
from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from protocol.errors import BusError
from protocol.gateways import STATE_SUBJECT, STREAM, FleetState, decode_state
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms
from protocol.wire import UNDECODABLE

READ_LIMIT_S: Final = 0.5
SILENT_MS: Final = 120_000  # past which nobody controls the fleet any more


async def read_fleet(bus: Bus) -> FleetState | None:
    """Return the fleet's state; None: there is no controller, or the queue server does not say so at once."""
    if not bus.connected:
        return None
    try:
        async with asyncio.timeout(READ_LIMIT_S):
            found = await bus.get_message(STREAM, last_by_subj=STATE_SUBJECT)
        state = None if found is None else decode_state(base64.b64decode(found["data"]))
    except (BusError, TimeoutError, *UNDECODABLE):
        return None
    return None if state is None or unix_now_ms() - state.sent_unix_ms > SILENT_MS else state


def fleet_families(state: FleetState) -> Iterator[Metric]:
    """Decided and present machines by pool, and those that are over."""
    decided = GaugeMetricFamily("spillway_fleet_decided_machines", "Machines that a pool is to have.", labels=("pool",))
    there = GaugeMetricFamily("spillway_fleet_machines", "Machines of a pool.", labels=("pool", "state"))
    ended = CounterMetricFamily(
        "spillway_fleet_ended_machines", "Machines that are over, since the controller leads.", labels=("pool", "how")
    )
    for pool in state.pools:
        decided.add_metric((pool.pool,), pool.decided)
        for name, count in pool.machines.items():
            there.add_metric((pool.pool, name), count)
        for name, count in pool.ended.items():
            ended.add_metric((pool.pool, name), count)
    yield from (decided, there, ended)
