"""Runs a line of a batch as a request, and classifies its outcome."""

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, Final

from msgspec import Struct

from db.accounts.principal import Principal
from gateway.api.errors import envelope, form_of, retry_wait_s
from gateway.batches.store import Counts
from gateway.core import Admitted, Core
from gateway.dispatch.stream import AnswerStream
from gateway.endpoints.endpoint import BeginTrace
from gateway.endpoints.operation import Operation
from gateway.errors import ClientDisconnected, InsufficientQuota, Refused
from gateway.http.body import LARGE_BODY_BYTES
from gateway.request.mailbox import ReaderCut
from gateway.request.request import Arrival, Trace
from gateway.telemetry.refusal_records import RefusedRequest
from gateway.telemetry.refusals import RefusalLog
from protocol.nats.clock import unix_now_ms
from protocol.process import calling_once

LONGEST_WAIT_S: Final = 60.0
USUAL_WAIT_S: Final = 5.0
BUDGET_WAIT_S: Final = 60.0  # between checks for the budget of a new day or month
METHOD: Final = "POST"

log = logging.getLogger(__name__)


# --- answers ----------------------------------------------------------------------------------------------------------


class Verdict(Enum):
    """What happens to a line without an answer."""

    FAILED = "written to the error file"
    REFUSED = "retried when there is capacity; not counted as an attempt"
    AGAIN = "retried, unless it has reached its maximum attempts"
    REVOKED = "stops the batch: the API key is no longer accepted"


class Answer(Struct, frozen=True):
    """The answer to a line."""

    request_id: str  # its id in the ledger
    status: int
    body: bytes
    counts: Counts  # added to the counts of the batch
    error: Refused | None = None


def verdict_of(error: Refused) -> Verdict:
    """Classify a refusal or failure."""
    form = form_of(error)
    if form.status == 401:
        return Verdict.REVOKED
    if form.status == 429:
        is_final = form.should_retry is False and not is_spent_budget(error)
        return Verdict.FAILED if is_final else Verdict.REFUSED
    if form.status == 503:
        return Verdict.REFUSED
    return Verdict.AGAIN if form.status >= 500 or form.status == 408 else Verdict.FAILED


def is_spent_budget(error: Refused) -> bool:
    """Return whether a budget is used up. False if the request alone costs more than the whole budget."""
    return isinstance(error, InsufficientQuota) and error.limit is None


def wait_s(error: Refused) -> float:
    """Return the seconds to wait before the line is retried."""
    if is_spent_budget(error):
        return BUDGET_WAIT_S
    told_s = retry_wait_s(error)
    return USUAL_WAIT_S if told_s is None else min(LONGEST_WAIT_S, told_s)


# --- asking -----------------------------------------------------------------------------------------------------------


def as_batch(principal: Principal) -> Principal:
    """Return the principal with batch priority."""
    return replace(principal, key_policy=replace(principal.key_policy, priority="batch"))


class Asking:
    """Runs lines as requests, without HTTP."""

    def __init__(
        self,
        core: Core,
        operations: Mapping[str, Operation[Any]],
        refusals: RefusalLog,
        begin_trace: BeginTrace | None,
    ) -> None:
        """``operations``: by endpoint of a batch."""
        self._core = core
        self._operations = operations
        self._refusals = refusals
        self._begin_trace = begin_trace
        self._timeouts = core.settings.timeouts

    async def ask(
        self, endpoint: str, body: bytes, principal: Principal, *, limit_s: float, gone: asyncio.Event
    ) -> Answer | None:
        """Run a line once. None: no answer, for example because ``gone`` was set."""
        operation, arrival = self._operations[endpoint], self._arrival(endpoint, len(body), limit_s)
        about = RefusedRequest(path=endpoint, method=METHOD, request_id=arrival.request_id, principal=principal)
        try:
            admitted = await self._admit(operation, body, as_batch(principal), arrival, about=about)
        except Refused as error:
            self._refusals.refused(operation.name, error, about)
            return _refused(operation, arrival, error)
        except Exception:
            log.exception("request %s failed before it was admitted", arrival.request_id)
            return _refused(operation, arrival, Refused())
        return await self._answer(operation, admitted, arrival, gone)

    def _arrival(self, endpoint: str, body_bytes: int, limit_s: float) -> Arrival:
        arrival = Arrival(
            request_id=f"req_{uuid.uuid4().hex}",
            received_s=time.monotonic(),
            received_unix_ms=unix_now_ms(),
            queue_wait_s=min(self._timeouts.queue_wait_s, limit_s),
            deadline_s=time.monotonic() + limit_s,
            body_bytes=body_bytes,
        )
        if self._begin_trace is None:
            return arrival
        return replace(arrival, trace=self._begin_trace(arrival.request_id, METHOD, endpoint, {}))

    async def _admit(
        self, operation: Operation[Any], body: bytes, principal: Principal, arrival: Arrival, *, about: RefusedRequest
    ) -> Admitted[Any]:
        self._core.refuse_if_full()
        held = await self._core.hold(principal) if len(body) > LARGE_BODY_BYTES else None
        try:
            call = await operation.read(principal, body)
            about.model = call.request.model
            return await operation.admit(principal, call, arrival, held)
        except BaseException as error:
            if held is not None:
                held.refund()
            if arrival.trace is not None:
                _end_refused(arrival.trace, error)
            raise

    async def _answer(
        self, operation: Operation[Any], admitted: Admitted[Any], arrival: Arrival, gone: asyncio.Event
    ) -> Answer | None:
        stream, status = self._core.start(admitted), None
        try:
            with calling_once(gone, stream.cancel):
                await stream.end()
                whole = await operation.whole(stream, arrival)
                body = whole if isinstance(whole, bytes) else b"".join([piece async for piece in whole])
                stream.note_status(200)
                await stream.ensure_recorded(self._timeouts.row_s)
            status = 200
            return Answer(arrival.request_id, status, body, _counts_of(stream))
        except Refused as error:
            status = form_of(error).status
            return _refused(operation, arrival, error)
        except (ClientDisconnected, ReaderCut):
            return None
        except Exception:
            log.exception("request %s failed while it was answered", arrival.request_id)
            status = 500
            return _refused(operation, arrival, Refused())
        finally:
            stream.close(status)


def _end_refused(trace: Trace, error: BaseException) -> None:
    refusal = error if isinstance(error, Refused) else Refused()
    trace.refused(form_of(refusal).status, refusal)


def _refused(operation: Operation[Any], arrival: Arrival, error: Refused) -> Answer:
    error.forget_frames()
    style = operation.style
    body = envelope(error) if style is None else style.error_body(error, arrival.request_id)
    return Answer(arrival.request_id, form_of(error).status, body, Counts(failed=1), error)


def _counts_of(stream: AnswerStream[Any]) -> Counts:
    return Counts(1, 0, stream.prompt_tokens, stream.cached_tokens, stream.completion_tokens)
