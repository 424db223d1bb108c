"""Records of refused requests for the ledger: counts per group and minute, and some individual requests.

    refused ──> count of its group in this minute ──FLUSH_S──> outbox
            └─> its own record, at most NAMED_A_SECOND ────────^

A flood of refusals costs a bounded number of small records, in memory and in the stream. A killed gateway loses the
counts of at most the last FLUSH_S.
"""

import asyncio
import uuid
from collections.abc import Callable
from typing import Final, NamedTuple

from msgspec import Struct

from db.accounts.masking import masked
from db.accounts.principal import Principal
from gateway.errors import BadRequest, Refused
from protocol.job import encode
from protocol.nats.clock import unix_now_ms
from protocol.refusals import MINUTE_MS, RefusalCount, RefusalRecord
from protocol.wire import PROTOCOL_VERSION

FLUSH_S: Final = 0.5
MAX_GROUPS: Final = 1000  # in one minute; beyond it, counts omit key and model
NAMED_A_SECOND: Final = 50
NAMED_A_SECOND_EACH: Final = 5  # of one code and key, so that a flood does not hide others
MAX_TEXT_CHARS: Final = 300  # of texts from the client or an error

Put = Callable[[str, bytes], object]  # record id, encoded record


class RefusedRequest(Struct):
    """The known data of a refused request."""

    path: str
    method: str = ""
    client: str = ""  # its address
    request_id: str = ""  # "": the answer has none
    principal: Principal | None = None  # None: unknown
    model: str | None = None  # as the client wrote it; None: the body was not read


class Verdict(NamedTuple):
    """The status and code of a refusal."""

    endpoint: str
    code: str
    status: int


class _Group(NamedTuple):
    verdict: Verdict
    key_id: str
    team_id: str
    model: str


class RefusalRecords:
    """Counts refusals and publishes the counts. Only used in the event loop."""

    def __init__(self, put: Put, gateway_id: str, model_of: Callable[[str], str | None]) -> None:
        """``put``: adds a record to a usage outbox; ``model_of``: returns the model of a name, None if unknown."""
        self._put = put
        self._gateway_id = gateway_id
        self._model_of = model_of
        self._run_id = uuid.uuid4().hex
        self._published = 0  # published messages, for their ids
        self._minute_unix_ms = 0
        self._counts: dict[_Group, int] = {}  # in this minute
        self._changed: set[_Group] = set()  # since the last flush
        self._named: dict[tuple[str, str], int] = {}  # individual records in this second, by code and key
        self._named_second = 0
        self._flushing: asyncio.TimerHandle | None = None

    def note(self, verdict: Verdict, error: Refused | None, request: RefusedRequest) -> None:
        """Count a refusal. ``error``: None if the client had left."""
        now_unix_ms = unix_now_ms()
        self._turn_to(now_unix_ms // MINUTE_MS * MINUTE_MS)
        group = self._group(verdict, request)
        self._counts[group] = self._counts.get(group, 0) + 1
        self._changed.add(group)
        if request.request_id and self._may_name(now_unix_ms // 1000, verdict.code, group.key_id):
            self._publish(self._record(now_unix_ms, verdict, error, request))
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Publish the counts that have changed."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        for group in self._changed:
            self._publish(
                RefusalCount(
                    v=PROTOCOL_VERSION,
                    gateway_id=self._gateway_id,
                    run_id=self._run_id,
                    minute_unix_ms=self._minute_unix_ms,
                    refusals=self._counts[group],
                    code=group.verdict.code,
                    status=group.verdict.status,
                    endpoint=group.verdict.endpoint,
                    key_id=group.key_id,
                    team_id=group.team_id,
                    model=group.model,
                )
            )
        self._changed.clear()

    def _turn_to(self, minute_unix_ms: int) -> None:
        if minute_unix_ms > self._minute_unix_ms:  # if the clock is set back, the later minute continues
            self.flush()
            self._counts.clear()
            self._minute_unix_ms = minute_unix_ms

    def _group(self, verdict: Verdict, request: RefusedRequest) -> _Group:
        key_id, team_id = (
            ("", "") if request.principal is None else (request.principal.key_id, request.principal.team_id)
        )
        model = None if request.model is None else self._model_of(request.model)
        group = _Group(verdict, key_id, team_id, model or "")
        if group in self._counts or len(self._counts) < MAX_GROUPS:
            return group
        return _Group(verdict, "", "", "")

    def _may_name(self, second: int, code: str, key_id: str) -> bool:
        if second != self._named_second:
            self._named_second = second
            self._named.clear()
        named = self._named.get((code, key_id), 0)
        if named == NAMED_A_SECOND_EACH or sum(self._named.values()) == NAMED_A_SECOND:
            return False
        self._named[code, key_id] = named + 1
        return True

    def _record(
        self, now_unix_ms: int, verdict: Verdict, error: Refused | None, request: RefusedRequest
    ) -> RefusalRecord:
        principal = request.principal
        # A message about a field may repeat its content.
        message = None if error is None or isinstance(error, BadRequest) else _storable(error.message)
        return RefusalRecord(
            v=PROTOCOL_VERSION,
            request_id=request.request_id,
            gateway_id=self._gateway_id,
            received_unix_ms=now_unix_ms,
            endpoint=verdict.endpoint,
            code=verdict.code,
            status=verdict.status,
            method=_storable(request.method),
            path=_storable(request.path),
            client=request.client,
            message=message,
            param=None if error is None or error.param is None else _storable(error.param),
            model=None if request.model is None else self._model_of(request.model) or _storable(request.model),
            key_id=principal.key_id if principal else "",
            key_name=principal.key_name if principal else "",
            team_id=principal.team_id if principal else "",
            organisation_id=principal.organisation_id if principal else "",
        )

    def _publish(self, record: RefusalCount | RefusalRecord) -> None:
        self._published += 1
        self._put(f"refusal-{self._run_id}-{self._published}", encode(record))


def _storable(text: str) -> str:
    """Return a text without secrets, shortened, that every database can store."""
    return masked(text)[:MAX_TEXT_CHARS].encode(errors="replace").decode().replace("\0", "�")
