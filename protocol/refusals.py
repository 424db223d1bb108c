"""Messages of gateways to the ledger about refused requests, in the USAGE stream.

All refusals are counted, and some are recorded individually: in a flood, a few per second.

    RefusalCount     the count of one group in one minute, by one process of a gateway; a later one replaces it
    RefusalRecord    one refused request
"""

from msgspec import Struct

from protocol.wire import Whole

MINUTE_MS = 60_000


class RefusalCount(Struct, frozen=True, tag="refusal_count", omit_defaults=True):
    """The refusals of one group in one minute, from the minute's start to this message.

    Cumulative, so that a duplicate or late message changes nothing.
    """

    v: int
    gateway_id: str
    run_id: str  # one process of the gateway; never reused
    minute_unix_ms: Whole  # its start
    refusals: Whole
    code: str
    status: Whole
    endpoint: str
    key_id: str = ""  # this and the following: "" if unknown
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
    status: Whole  # 499: the client left before the answer
    method: str
    path: str
    client: str  # its address
    message: str | None = None  # None: it might repeat the request's content
    param: str | None = None  # the field at fault
    model: str | None = None  # its canonical name, or the client's text for an unknown one
    key_id: str = ""  # this and the following: "" if unknown
    key_name: str = ""
    team_id: str = ""
    organisation_id: str = ""
