"""What a fleet controller tells of its pools, once a round: an entry of the ``fleet`` bucket, for gateways' metrics."""

from typing import Final

import msgspec
from msgspec import Struct

from protocol import subjects

STREAM: Final = f"KV_{subjects.FLEET_BUCKET}"
STATE_SUBJECT: Final = subjects.kv_subject(subjects.FLEET_BUCKET, "state")


class PoolState(Struct, frozen=True):
    """One pool."""

    pool: str
    decided: int  # machines
    machines: dict[str, int]  # that are there now, by state
    ended: dict[str, int]  # since the controller leads: "gone", "lost" or "failed"


class FleetState(Struct, frozen=True):
    """All pools of a fleet."""

    sent_unix_ms: int
    pools: tuple[PoolState, ...]


encode_state: Final = msgspec.json.Encoder().encode
decode_state: Final = msgspec.json.Decoder(FleetState).decode
