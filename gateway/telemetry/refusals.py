"""Counts, records and logs refused requests. In a flood only a few per second are logged."""

import asyncio
import logging
from typing import Final

from msgspec import Struct

from db.accounts.masking import masked
from gateway.api.errors import form_of
from gateway.errors import Refused
from gateway.telemetry.metrics import RequestSeries
from gateway.telemetry.refusal_records import RefusalRecords, RefusedRequest, Verdict

LINES_A_SECOND: Final = 10  # of each reason
WINDOW_S: Final = 1.0
MAX_TEXT_CHARS: Final = 200  # of a path, a model or a field in a line
CLIENT_LEFT: Final = ("client_left", 499)  # before the request was complete, or before its admission
HTTP: Final = "http"  # the endpoint of requests refused before routing

log = logging.getLogger(__name__)


class _Reason(Struct):
    count: int = 0  # since the start
    lines: int = 0  # in this window
    unlogged: int = 0
    window: asyncio.TimerHandle | None = None


class RefusalLog:
    """Counts, records and logs refused requests. Only used in the event loop."""

    def __init__(self, series: RequestSeries, records: RefusalRecords) -> None:
        self._series = series
        self._records = records
        self._reasons: dict[str, _Reason] = {}

    def refused(self, endpoint: str, error: Refused | None, request: RefusedRequest) -> None:
        """Report a refused request, or, without ``error``, one whose client left before the answer.

        Never includes the request's content.
        """
        code, status = CLIENT_LEFT if error is None else (error.code or form_of(error).type, form_of(error).status)
        self._series.refused(endpoint, status, code if error is None else error.code)
        self._records.note(Verdict(endpoint, code, status), error, request)
        reason = self._reasons.setdefault(code, _Reason())
        reason.count += 1
        if reason.window is None:
            reason.window = asyncio.get_running_loop().call_later(WINDOW_S, self._next_window, code)
        if reason.lines == LINES_A_SECOND:
            reason.unlogged += 1
            return
        reason.lines += 1
        principal = request.principal
        reported: dict[str, object] = {
            "reason": code,
            "status": status,
            "count": reason.count,
            "endpoint": endpoint,
            "request_id": request.request_id or None,
            "method": request.method or None,
            "path": masked(request.path)[:MAX_TEXT_CHARS],
            "client": request.client,
            "key_name": principal.key_name if principal else None,
            "team_id": principal.team_id if principal else None,
            "model": masked(request.model)[:MAX_TEXT_CHARS] if request.model else None,
            "param": error.param[:MAX_TEXT_CHARS] if error is not None and error.param is not None else None,
        }
        known = {name: value for name, value in reported.items() if value is not None}
        log.info("request refused", extra={"fields": known})

    def _next_window(self, code: str) -> None:
        reason = self._reasons[code]
        reason.window = None
        self._log_rest(code, reason)

    def _log_rest(self, code: str, reason: _Reason) -> None:
        if reason.unlogged:
            fields = {"reason": code, "more": reason.unlogged, "count": reason.count}
            log.info("requests refused", extra={"fields": fields})
        reason.lines = reason.unlogged = 0

    def flush(self) -> None:
        """Log and publish everything pending, because the gateway ends."""
        self._records.flush()
        for code, reason in self._reasons.items():
            self._log_rest(code, reason)
