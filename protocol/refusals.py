"""Messages of gateways to the ledger about refused requests, in the USAGE stream like the records of admitted ones.

Each refusal is counted, and some are told one by one: in a flood, a few a second.

    RefusalCount     how many so far in one minute, of one group, by one process of a gateway; a later one replaces it
    RefusalRecord    one refused request
"""

from msgspec import Struct

from protocol.wire import Whole

MINUTE_MS = 60_000


class RefusalCount(Struct, frozen=True, tag="refusal_count", omit_defaults=True):
    """The refusals of one group in one minute, counted from the minute's start until this was published.

    It is no difference to the one before, so that a message that is delivered twice, or late, changes nothing.
    """

    v: int
    gateway_id: str
    run_id: str  # one process of the gateway, never used again
    minute_unix_ms: Whole  # its start
    refusals: Whole
    code: str
    status: Whole
    endpoint: str
    key_id: str = ""  # "": unknown, like each of the following
    team_id: str = ""
    model: str = ""  # its canonical name


class RefusalRecord(Struct, frozen=True, tag="refusal", omit_defaults=True):
    """One request that was refused before it was admitted."""

    v: int
    request_id: str
    gateway_id: str
    received_unix_ms: Whole
    endpoint: str
    code: str
    status: Whole  # 499: its caller left before there was an answer
    method: str
    path: str
    client: str  # its address
    message: str | None = None  # None: it might repeat what was asked
    param: str | None = None  # the field that it is about
    model: str | None = None  # its canonical name, or of an unknown one what the caller wrote
    key_id: str = ""  # "": unknown, like each of the following
    key_name: str = ""
    team_id: str = ""
    organisation_id: str = ""
