"""From an ended request to its one ledger record."""

from gateway.dispatch.request import OpenRequest
from protocol.messages import PROTOCOL_VERSION, RequestRecord

CLIENT_CLOSED_REQUEST = 499  # nginx's status for a caller that left before there was an answer


def usage_record(request: OpenRequest, gateway_id: str) -> RequestRecord:
    """The record of a request that has ended; counts are exact."""
    admission, accepted = request.admission, request.accepted
    return RequestRecord(
        v=PROTOCOL_VERSION,
        request_id=request.request_id,
        gateway_id=gateway_id,
        received_unix_ms=admission.received_unix_ms,
        endpoint=admission.endpoint,
        model=admission.model,
        key_id=admission.key_id,
        key_name=admission.key_name,
        stream=admission.stream,
        outcome=request.outcome,
        http_status=request.http_status or CLIENT_CLOSED_REQUEST,
        error_code=request.failure.code if request.failure else None,
        finish_reason=request.choices[0].finish_reason,
        prompt_tokens=admission.prompt_tokens,
        cached_tokens=request.cached_tokens,
        completion_tokens=request.completion_tokens,
        attempts=request.attempt,
        queue_ms=_ms_between(admission.admitted_s, request.accepted_s),
        ttft_ms=_ms_between(admission.received_s, request.first_token_s),
        total_ms=_ms_between(admission.received_s, request.ended_s) or 0.0,
        pool=accepted.pool if accepted else None,
        provider=accepted.provider if accepted else None,
        region=accepted.region if accepted else None,
    )


def _ms_between(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else round((end_s - start_s) * 1000, 3)
