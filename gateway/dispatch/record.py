"""Records of a request: its ledger record, those of lost attempts, and its dead letter."""

import hashlib
import time
from typing import Final

from msgspec.structs import asdict, replace

from gateway.dispatch.request import OpenRequest
from gateway.request.request import Admission
from protocol.job import PROTOCOL_VERSION, TAKES_IDS, Heartbeat, Origin, Rescue, rescue_by
from protocol.nats.clock import unix_now_ms
from protocol.usage import AttemptRecord, DeadLetter, RequestIntent, RequestRecord, sampling_without_texts

CLIENT_CLOSED_REQUEST: Final = 499  # nginx's status for a caller that left before there was an answer
MAX_REASON_CHARS: Final = 1000  # of each failure in a dead letter
UNKNOWN: Final = "unknown"  # of a worker that was lost before its first heartbeat came


def origin_of(admission: Admission, gateway_id: str) -> Origin:
    """Return the identity that a job carries, so that a record can be made should this gateway die."""
    return Origin(
        gateway_id,
        admission.endpoint,
        admission.principal.key_id,
        admission.principal.key_name,
        admission.stream,
        admission.principal.team_id,
        admission.principal.organisation_id,
    )


def usage_intent(admission: Admission, gateway_id: str) -> RequestIntent:
    """Return the intent that stands for the request's record, should this gateway die."""
    return RequestIntent(
        v=PROTOCOL_VERSION,
        request_id=admission.request_id,
        gateway_id=gateway_id,
        received_unix_ms=admission.received_unix_ms,
        endpoint=admission.endpoint,
        model=admission.model,
        key_id=admission.principal.key_id,
        key_name=admission.principal.key_name,
        stream=admission.stream,
        prompt_tokens=admission.prompt_tokens,
        team_id=admission.principal.team_id,
        organisation_id=admission.principal.organisation_id,
    )


def usage_record(request: OpenRequest, gateway_id: str) -> RequestRecord:
    """Return the record of a request that has ended; counts are exact."""
    admission, accepted, spent = request.admission, request.accepted, request.log.spent
    return RequestRecord(
        v=PROTOCOL_VERSION,
        request_id=request.request_id,
        gateway_id=gateway_id,
        received_unix_ms=admission.received_unix_ms,
        endpoint=admission.endpoint,
        model=admission.model,
        key_id=admission.principal.key_id,
        key_name=admission.principal.key_name,
        stream=admission.stream,
        outcome=request.outcome,
        http_status=request.http_status or CLIENT_CLOSED_REQUEST,
        error_code=request.failure.code if request.failure else None,
        finish_reason=request.choices[0].finish_reason if admission.pooling is None else None,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        completion_tokens=request.completion_tokens,
        attempts=request.attempt,
        queue_ms=_ms_between(admission.admitted_s, request.accepted_s),
        ttft_ms=_ms_between(admission.received_s, request.first_token_s),
        total_ms=_ms_between(admission.received_s, request.ended_s) or 0.0,
        pool=accepted.pool if accepted else None,
        provider=accepted.provider if accepted else None,
        region=accepted.region if accepted else None,
        engine_queue_ms=round(spent.engine_queue_ms, 3) if accepted else None,
        prefill_ms=round(spent.prefill_ms, 3) if accepted else None,
        decode_ms=round(spent.decode_ms, 3) if accepted else None,
        preemptions=spent.preemptions if accepted else None,
        team_id=admission.principal.team_id,
        organisation_id=admission.principal.organisation_id,
        tier=accepted.tier if accepted else None,
        counted_by=request.choices.counted_by,
    )


def settle_limits(request: OpenRequest) -> None:
    """Settle the limits of key and team with what an ended request used: nothing, if no worker accepted it."""
    reservation = request.admission.reservation
    if reservation is None:
        return
    if request.accepted is None:
        reservation.settle(0, 0, 0)
    else:
        tokens = request.prompt_tokens, request.cached_tokens, request.completion_tokens
        reservation.settle(*tokens)


def lost_attempt_record(
    request: OpenRequest,
    worker: Heartbeat | None,
    outcome: str,
    code: str | None,
    *,
    gateway_id: str,
    now_s: float,
) -> AttemptRecord:
    """Return the record of the current attempt as the gateway has seen it, for a worker that may not publish one.

    ``worker`` is what it last told of itself. If it does leave one all the same, the first to come stays.
    """
    current = request.current
    accepted, accepted_s = current.accepted, current.accepted_s
    if accepted is None or accepted_s is None:
        raise ValueError("no worker has accepted this attempt")
    total_ms = _ms_between(accepted_s, now_s) or 0.0
    return AttemptRecord(
        v=PROTOCOL_VERSION,
        request_id=request.request_id,
        attempt=current.number,
        worker_id=accepted.worker_id,
        pool=accepted.pool,
        provider=accepted.provider,
        region=accepted.region,
        tier=worker.tier if worker else UNKNOWN,
        engine=worker.engine if worker else UNKNOWN,
        model=request.admission.model,
        started_unix_ms=int(time.time() * 1000 - total_ms),
        outcome=outcome,
        error_code=code,
        prompt_tokens=_read_tokens(request),
        cached_tokens=0,
        completion_tokens=request.attempt_tokens,
        queue_ms=accepted.queue_ms,
        ttft_ms=_ms_between(accepted_s, current.first_token_s),
        total_ms=total_ms,
        usd_per_hour=worker.usd_per_hour if worker else 0.0,
        resumed_tokens=current.tokens_before,
        received_unix_ms=request.admission.received_unix_ms,
        counted_by="engine" if accepted.counted_by == "engine" else "estimate",
        rescue=rescue(request, worker),
        **asdict(origin_of(request.admission, gateway_id)),
    )


def rescue(request: OpenRequest, worker: Heartbeat | None) -> Rescue | None:
    """Return how the current attempt continues what was held before it."""
    if request.admission.pooling is not None:
        return None
    current = request.current
    takes = TAKES_IDS if worker is None else worker.takes
    return rescue_by(current.number, takes, is_begun=current.tokens_before > 0, is_encoded=current.is_encoded)


def _read_tokens(request: OpenRequest) -> int:
    """Return the attempt's prompt tokens. A hosted API gets each choice as its own call, with what is held."""
    admission = request.admission
    if request.current.hosted is None or admission.pooling is not None:
        return admission.prompt_tokens
    return admission.prompt_tokens * admission.sampling.n + request.current.tokens_before


def dead_letter(request: OpenRequest, gateway_id: str) -> DeadLetter:
    """Return the dead letter of a request that was given up after its last attempt."""
    admission = request.admission
    sampling, withheld_bytes = sampling_without_texts(admission.sampling)
    grammar = admission.sampling.grammar
    return DeadLetter(
        v=PROTOCOL_VERSION,
        request_id=request.request_id,
        gateway_id=gateway_id,
        model=admission.model,
        tenant=admission.principal.tenant,
        key_id=admission.principal.key_id,
        prompt_tokens=admission.prompt_tokens,
        sampling=sampling,
        accepted_unix_ms=admission.received_unix_ms,
        given_up_unix_ms=unix_now_ms(),
        failures=tuple(replace(each, reason=each.reason[:MAX_REASON_CHARS]) for each in request.log.failures),
        withheld_bytes=withheld_bytes,
        grammar_sha256=hashlib.sha256(grammar.source.encode()).hexdigest() if grammar else "",
    )


def _ms_between(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else round((end_s - start_s) * 1000, 3)
