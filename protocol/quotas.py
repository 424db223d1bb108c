"""Limits shared by gateways: one account for each key and each team that has any, in the ``quotas`` bucket.

An account says what was used and what each gateway holds of the rest. A gateway changes it by writing the whole entry
back as the successor of the one it has read (compare and set), so there is one order of all changes, whoever makes
them (docs/adr/0007). Beside the bucket, core NATS carries three hints:

    gateway ──account id──> all gateways     ``subjects.QUOTA_WANTED``: who holds what he does not use, give it back
    gateway ──account id──> ledger           ``subjects.BUDGET_REFUSED``: what is left of it no longer covers a request
    gateway ──sequence────> ledger           ``subjects.LEDGER_WANTED``: an account begins, which needs all up to it
"""

from enum import IntEnum

import msgspec
from msgspec import Struct

from protocol import wire

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
    period: str = ""  # the budget's, see db.accounts.limits.period_at
    spent_nano_usd: int = 0  # in this period, by requests that have ended
    presumed_nano_usd: int = 0  # of this, what gateways held that vanished
    leases: dict[str, Lease] = {}  # by gateway
    vanished: dict[str, ExpiredLease] = {}  # by gateway; until it is back, or recounted


encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Account)


def decode_account(payload: bytes) -> Account:
    """Decode an Account. Raises ProtocolError."""
    return wire.decode_versioned(_decoder, payload, "quota account")
