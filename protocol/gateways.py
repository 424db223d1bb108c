"""What gateways tell each other, and what fleet controllers and the queue server tell them."""

from enum import IntEnum, StrEnum
from typing import Final

import msgspec
from msgspec import Struct

from protocol import subjects, wire

# --- lanes ------------------------------------------------------------------------------------------------------------
#
# Messages between gateways about lanes: which one each tenant's jobs wait in.
#
# A tenant's jobs wait in one lane of a queue, or it would have a second share of the workers. Each gateway tells so
# every half second, and what it said last counts for a little longer.
#
#     gateway ──LanesInUse──> all gateways     core NATS, ``subjects.LANES_IN_USE``


class LaneInUse(Struct, frozen=True, array_like=True):
    """A tenant has jobs waiting in a lane of a queue."""

    tenant: str
    queue: str  # subjects.queue_of
    lane: str


class LanesInUse(Struct, frozen=True, array_like=True):
    """All of them at one gateway."""

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
# is asked the same again reads the answer from that one, part by part:
#
#     gateway ──AnswerPartRequest (request)──> owner     core NATS, ``subjects.answers_subject``
#     gateway <──Part (reply)─────── owner
#
# Asking part by part needs no state at the owner, loses nothing (a lost reply is asked for again), and tells at once
# when the owner is gone: the server itself answers for a subject that nobody listens on.

MAX_PART_BYTES: Final = 64 * 1024
PART_WAIT_S: Final = 1.0  # how long an owner keeps a question for which there is nothing new yet


class Claim(Struct, frozen=True):
    """The value of a key in the bucket."""

    gateway_id: str
    fingerprint: str  # of the request's path and body


class AnswerPartRequest(Struct, frozen=True, array_like=True):
    """The answer to this request, please, from here on."""

    name: str  # of the key in the bucket
    fingerprint: str
    position: int  # bytes of the body that the asker has


class ClaimState(StrEnum):
    """The state of a request, as reported by the owner of its key."""

    UNKNOWN = "unknown"  # it has forgotten the key: take it over
    REUSED = "reused"  # another request has this key
    ATTACHED = "attached"  # running
    REPLAYED = "replayed"  # ended well
    NOT_KEPT = "not kept"  # it runs, but the answer has outgrown the room for what was asked


class Part(Struct, frozen=True, array_like=True):
    """A piece of an answer."""

    standing: ClaimState
    status: int = 0  # HTTP; 0: there is none yet
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    ended: bool = False  # there will be no more
    complete: bool = False  # and this was really all


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
# Limits shared by gateways: one account for each key and each team that has any, in the ``quotas`` bucket.
#
# An account says what was used and what each gateway holds of the rest. A gateway changes it by writing the whole entry
# back as the successor of the one it has read (compare and set), so there is one order of all changes, whoever makes
# them (docs/adr/0007). Beside the bucket, core NATS carries three hints:
#
#     gateway ──account id──> all gateways     ``subjects.QUOTA_WANTED``: who holds what he does not use, give it back
#     gateway ──account id──> ledger           ``subjects.BUDGET_REFUSED``: what is left of it no longer covers a
# request     gateway ──sequence────> ledger           ``subjects.LEDGER_WANTED``: an account begins, which needs all up
# to it

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
    """The share one gateway holds: no other can have it until it is returned or the lease has expired."""

    exchange: int  # the gateway's number of the exchange that wrote this
    expires_unix_ms: int
    held: Amounts  # of CONCURRENT and MONEY with what its requests take up
    idle: Amounts  # of this, what no request took up at that time
    spent_nano_usd: int = 0  # what the gateway has reported in this period


class ExpiredLease(Struct, frozen=True, array_like=True):
    """The share of a budget a gateway held when its lease expired: it counts as spent until corrected."""

    exchange: int  # its last one
    spent_nano_usd: int  # what it had reported in this period
    held_nano_usd: int


class Account(Struct, frozen=True, omit_defaults=True):
    """The truth about one key's or team's limits."""

    v: int
    used: tuple[dict[int, int], dict[int, int]] = ({}, {})  # of RATES: by unix second of their admission
    period: str = ""  # the budget's, see db.accounts.principal.period_at
    spent_nano_usd: int = 0  # in this period, by requests that have ended
    presumed_nano_usd: int = 0  # of this, what gateways held that vanished
    leases: dict[str, Lease] = {}  # by gateway
    vanished: dict[str, ExpiredLease] = {}  # by gateway; until it is back, or recounted


_account_decoder = msgspec.msgpack.Decoder(Account)


def decode_account(payload: bytes) -> Account:
    """Decode an Account. Raises ProtocolError."""
    return wire.decode_versioned(_account_decoder, payload, "quota account")


# --- fleet ------------------------------------------------------------------------------------------------------------
#
# What a fleet controller tells of its pools, once a round: an entry of the ``fleet`` bucket, for gateways' metrics.

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


# --- disconnects ------------------------------------------------------------------------------------------------------
#
# The queue server's news of connections that have ended: of workers, by the names of their connections.


class _Client(Struct):
    name: str = ""


class _Event(Struct):
    client: _Client
    reason: str = ""


_event_decoder: Final = msgspec.json.Decoder(_Event)


class Disconnect(Struct, frozen=True):
    """A worker's connection has ended."""

    worker_id: str
    reason: str  # the server's, such as "Client Closed"


def decode_disconnect(payload: bytes) -> Disconnect | None:
    """Decode an event of ``subjects.DISCONNECTS``; None where the connection was no worker's. Raises ProtocolError."""
    event = wire.decode(_event_decoder, payload, "disconnect event")
    worker_id = subjects.worker_of_connection(event.client.name)
    return None if worker_id is None else Disconnect(worker_id, event.reason)
