"""Every refused request is counted and leaves a line in the log; in a flood a few a second, and then how many more."""

import asyncio
import logging
from typing import Final

from msgspec import Struct

from db.accounts.masking import masked
from gateway.api.errors import form_of
from gateway.errors import Refused
from gateway.telemetry.metrics import RequestSeries

LINES_A_SECOND: Final = 10  # of each reason
WINDOW_S: Final = 1.0
MAX_PATH_CHARS: Final = 200
CLIENT_LEFT: Final = ("client_left", 499)  # before the request was here, or while it was not yet admitted
HTTP: Final = "http"  # the endpoint of what is refused before it is known whom it is for

log = logging.getLogger(__name__)


class _Reason(Struct):
    count: int = 0  # since the start
    lines: int = 0  # in this window
    unlogged: int = 0
    window: asyncio.TimerHandle | None = None


class RefusalLog:
    """Tells of requests that were not admitted. Only the event loop touches it."""

    def __init__(self, series: RequestSeries) -> None:
        self._series = series
        self._reasons: dict[str, _Reason] = {}

    def refused(self, endpoint: str, error: Refused | None, **fields: str | None) -> None:
        """Tell of a request whose answer is a refusal, or without an error one whose caller left before there was one.

        Never logs what was asked.
        """
        code, status = CLIENT_LEFT if error is None else (error.code or form_of(error).type, form_of(error).status)
        self._series.refused(endpoint, status, code if error is None else error.code)
        reason = self._reasons.setdefault(code, _Reason())
        reason.count += 1
        if reason.window is None:
            reason.window = asyncio.get_running_loop().call_later(WINDOW_S, self._next_window, code)
        if reason.lines == LINES_A_SECOND:
            reason.unlogged += 1
            return
        reason.lines += 1
        reported = {"reason": code, "status": status, "count": reason.count, "endpoint": endpoint, **fields}
        if (path := fields.get("path")) is not None:
            reported["path"] = masked(path)[:MAX_PATH_CHARS]
        if error is not None and error.param is not None:
            reported["param"] = error.param[:MAX_PATH_CHARS]
        log.info("request refused", extra={"fields": reported})

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
        """Log what has not been logged yet: the gateway ends."""
        for code, reason in self._reasons.items():
            self._log_rest(code, reason)
