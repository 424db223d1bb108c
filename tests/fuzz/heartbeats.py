"""Heartbeats of workers, up to the rows that the ledger writes of them."""

from msgspec.structs import replace

from ledger.machine_time import MAX_CATCH_UP_MS, QUARTER_MS, Moment, _check_plausible, _rows
from ledger.prices import PriceBook
from ledger.store import MAX_USD_PER_HOUR
from protocol import messages as m
from protocol.clock import unix_now_ms
from protocol.engine_stats import EngineStats, Histogram, Pace
from protocol.errors import ProtocolError
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
