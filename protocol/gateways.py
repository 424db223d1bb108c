"""Messages between gateways, and messages of fleet controllers and the queue server to gateways."""

from enum import IntEnum, StrEnum
from typing import Final

import msgspec
from msgspec import Struct

from protocol import subjects, wire

# --- lanes ------------------------------------------------------------------------------------------------------------
#
# Messages between gateways about the lane in which each tenant's jobs wait.
#
# A tenant's jobs wait in one lane of a queue, because a second lane would give it a second share of the workers. Each
# gateway reports its lanes every half second; a report is valid for a little longer.
#
#     gateway ──LanesInUse──> all gateways     core NATS, ``subjects.LANES_IN_USE``


class LaneInUse(Struct, frozen=True, array_like=True):
    """A lane in which jobs of a tenant wait."""

    tenant: str
    queue: str  # subjects.queue_of
    lane: str


class LanesInUse(Struct, frozen=True, array_like=True):
    """All lanes in use at one gateway."""

    gateway_id: str
    lanes: tuple[LaneInUse, ...]


encode = msgspec.msgpack.Encoder().encode
_lanes_decoder = msgspec.msgpack.Decoder(LanesInUse)


def decode_lanes(payload: bytes) -> LanesInUse:
    """Decode a LanesInUse. Raises ProtocolError."""
    return wire.decode(_lanes_decoder, payload, "lanes")


# --- idempotency ------------------------------------------------------------------------------------------------------
#
# Messages between gateways about requests that carry an ``Idempotency-Key``.
#
# The ``idempotency`` bucket holds one Claim per key: which gateway runs the request, or has its answer. A gateway that
# receives the same request again reads the answer from that one, part by part:
#
#     gateway ──AnswerPartRequest (request)──> owner     core NATS, ``subjects.answers_subject``
#     gateway <──Part (reply)─────── owner
#
# Reading part by part needs no state at the owner, tolerates lost replies (the asker repeats the query), and detects at
# once when the owner is gone: the server replies "no responders" for a subject without subscribers.

MAX_PART_BYTES: Final = 64 * 1024
PART_WAIT_S: Final = 1.0  # how long an owner waits for new data before it replies


class Claim(Struct, frozen=True):
    """The value of an idempotency key in the bucket."""

    gateway_id: str
    fingerprint: str  # of the request's path and body


class AnswerPartRequest(Struct, frozen=True, array_like=True):
    """A query for the rest of an answer."""

    name: str  # of the key in the bucket
    fingerprint: str
    position: int  # bytes of the body that the asker has


class ClaimState(StrEnum):
    """The state of a request, as reported by the owner of its key."""

    UNKNOWN = "unknown"  # the owner has forgotten the key: take it over
    REUSED = "reused"  # another request used this key
    ATTACHED = "attached"  # running
    REPLAYED = "replayed"  # ended with an answer
    NOT_KEPT = "not kept"  # running, but its answer no longer has the requested part: it outgrew the buffer


class Part(Struct, frozen=True, array_like=True):
    """A part of an answer."""

    standing: ClaimState
    status: int = 0  # HTTP; 0: none yet
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    ended: bool = False  # no more will follow
    complete: bool = False  # the answer is complete


_claim_decoder = msgspec.msgpack.Decoder(Claim)
_ask_decoder = msgspec.msgpack.Decoder(AnswerPartRequest)
_part_decoder = msgspec.msgpack.Decoder(Part)


def decode_claim(payload: bytes) -> Claim:
    """Decode a Claim. Raises ProtocolError."""
    return wire.decode(_claim_decoder, payload, "claim")


def decode_ask(payload: bytes) -> AnswerPartRequest:
    """Decode an AnswerPartRequest. Raises ProtocolError."""
    return wire.decode(_ask_decoder, payload, "question")


def decode_part(payload: bytes) -> Part:
    """Decode a Part. Raises ProtocolError."""
    return wire.decode(_part_decoder, payload, "part of an answer")


# --- limits -----------------------------------------------------------------------------------------------------------
#
# Limits shared by gateways: one account for each key and team that has any, in the ``quotas`` bucket.
#
# An account records what was used and what each gateway holds of the rest. A gateway changes it by replacing the entry
# that it has read (compare-and-set), so that all changes have one order (docs/adr/0007). In addition to the bucket,
# core NATS carries three hints:
#
#     gateway ──account id──> all gateways     ``subjects.QUOTA_WANTED``: return idle amounts
#     gateway ──account id──> ledger           ``subjects.BUDGET_REFUSED``: too little of a budget is left for a request
#     gateway ──sequence────> ledger           ``subjects.LEDGER_WANTED``: write all records up to it

Amounts = tuple[int, int, int, int]  # by Kind
NOTHING: Amounts = (0, 0, 0, 0)


class Kind(IntEnum):
    """The limited quantities, and their positions in ``Amounts``."""

    REQUESTS = 0  # admitted, in any 60 s
    TOKENS = 1  # prompt and completion, in any 60 s
    CONCURRENT = 2  # requests admitted and not yet ended
    MONEY = 3  # nano-USD in a calendar period


RATES = (Kind.REQUESTS, Kind.TOKENS)
KINDS = tuple(Kind)


class Lease(Struct, frozen=True, array_like=True):
    """The share that one gateway holds: no other can use it until it is returned or the lease has expired."""

    exchange: int  # the gateway's number of the exchange that wrote this
    expires_unix_ms: int
    held: Amounts  # of CONCURRENT and MONEY including what running requests hold
    idle: Amounts  # of this, not held by a request at that time
    spent_nano_usd: int = 0  # reported by the gateway in this period


class ExpiredLease(Struct, frozen=True, array_like=True):
    """The share of a budget that a gateway held when its lease expired: it counts as spent until corrected."""

    exchange: int  # its last one
    spent_nano_usd: int  # reported by it in this period
    held_nano_usd: int


class Account(Struct, frozen=True, omit_defaults=True):
    """The shared state of one key's or team's limits."""

    v: int
    used: tuple[dict[int, int], dict[int, int]] = ({}, {})  # of RATES, by unix second of admission
    period: str = ""  # the budget's, see db.accounts.principal.period_at
    spent_nano_usd: int = 0  # in this period, by ended requests
    presumed_nano_usd: int = 0  # of this, amounts held by vanished gateways
    leases: dict[str, Lease] = {}  # by gateway
    vanished: dict[str, ExpiredLease] = {}  # by gateway; until it returns, or a recount
    restored_unix_ms: int = 0  # when the lost account was replaced by a gateway's copy


_account_decoder = msgspec.msgpack.Decoder(Account)


def decode_account(payload: bytes) -> Account:
    """Decode an Account. Raises ProtocolError."""
    return wire.decode_versioned(_account_decoder, payload, "quota account")


# --- fleet ------------------------------------------------------------------------------------------------------------
#
# A fleet controller's report of its pools, once per round: an entry of the ``fleet`` bucket, for gateways' metrics.

STREAM: Final = f"KV_{subjects.FLEET_BUCKET}"
STATE_SUBJECT: Final = subjects.kv_subject(subjects.FLEET_BUCKET, "state")


class PoolState(Struct, frozen=True):
    """One pool."""

    pool: str
    decided: int  # machines
    machines: dict[str, int]  # current ones by state
    ended: dict[str, int]  # since this controller became leader: "gone", "lost" or "failed"


class FleetState(Struct, frozen=True):
    """All pools of a fleet."""

    sent_unix_ms: int
    pools: tuple[PoolState, ...]


encode_state: Final = msgspec.json.Encoder().encode
decode_state: Final = msgspec.json.Decoder(FleetState).decode


# --- disconnects ------------------------------------------------------------------------------------------------------
#
# The queue server's events of closed connections. Workers are identified by connection name.


class _Client(Struct):
    name: str = ""


class _Event(Struct):
    client: _Client
    reason: str = ""


_event_decoder: Final = msgspec.json.Decoder(_Event)


class Disconnect(Struct, frozen=True):
    """The end of a worker's connection."""

    worker_id: str
    reason: str  # the server's, such as "Client Closed"


def decode_disconnect(payload: bytes) -> Disconnect | None:
    """Decode an event of ``subjects.DISCONNECTS``; None for connections of other clients. Raises ProtocolError."""
    event = wire.decode(_event_decoder, payload, "disconnect event")
    worker_id = subjects.worker_of_connection(event.client.name)
    return None if worker_id is None else Disconnect(worker_id, event.reason)
