"""Heartbeats of workers: what the gateway counts, shows and exposes of them, and the rows that the ledger writes."""

from collections.abc import Sequence

from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric

from console.dashboard import formats
from console.dashboard.live import kv_share
from db.prices import PriceBook
from gateway.admission.capacity import Capacity
from gateway.telemetry.engines import engine_families, worker_families
from ledger.machine_time import MAX_CATCH_UP_MS, QUARTER_MS, Moment, _check_plausible, _rows
from ledger.store import MAX_USD_PER_HOUR
from protocol import job as m
from protocol.errors import ProtocolError
from protocol.job import EngineStats, Histogram, Pace
from protocol.nats.clock import unix_now_ms
from tests.fuzz.mutations import Form
from tests.unit.protocol.test_versions import BEAT

FORM: Form = "msgpack"
NOW_MS = 1_800_000_000_000  # of the seeds: the corpus must mean the same next year
_SQL_INTEGER = 2**63

_SEED = replace(BEAT, sent_unix_ms=NOW_MS, started_unix_ms=NOW_MS - 3_600_000, busy_ms=1000)
_NONE = Histogram((1.0, 2.0), (0, 0, 0), 0.0)
_STATS = EngineStats(1, 0, 0.5, 10, 5, _NONE, _NONE)
SEEDS = [
    m.encode(_SEED),
    m.encode(replace(_SEED, stats=_STATS, pace=Pace(), revisions={"m": m.Revision("w", "t")}, draining=True)),
]


def run(payload: bytes) -> None:
    try:
        beat = m.decode_heartbeat(payload)
        _count(beat)
        beat = replace(beat, sent_unix_ms=beat.sent_unix_ms - NOW_MS + unix_now_ms())
        _check_plausible(beat)
    except ProtocolError:
        return
    rows = list(_rows(beat, Moment(beat.started_unix_ms, 0), PriceBook()))
    assert len(rows) <= MAX_CATCH_UP_MS / QUARTER_MS + 2
    for row in rows:
        numbers = [value for value in row.values() if isinstance(value, int)]
        assert all(0 <= number < _SQL_INTEGER for number in numbers), row
        assert 0 <= row["nano_usd_per_hour"] <= MAX_USD_PER_HOUR * 10**9


class _Families:
    """Families of metrics as a collector."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families


def _count(beat: m.Heartbeat) -> None:
    """Do with a heartbeat what a gateway does with whatever it can decode."""
    capacity = Capacity(["m"], [("p", "m")])
    capacity.on_heartbeat(_SEED)
    capacity.on_heartbeat(beat)
    capacity.took(beat.worker_id, 1)
    capacity.keep(lambda _, __: False, 0.0)
    place = capacity.of("m")
    assert (place.workers, place.free_sequences, place.running) == (0, 0, 0), "what has come is not gone"
    registry = CollectorRegistry()
    registry.register(_Families([*engine_families([beat], beat.models), *worker_families([beat], ["m"])]))
    generate_latest(registry)
    formats.share(kv_share([beat]))
