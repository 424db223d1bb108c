"""Usage records with plain defaults."""

from typing import Any

from protocol.job import PROTOCOL_VERSION
from protocol.usage import AttemptRecord, RequestIntent, RequestRecord


def request_record(request_id: str, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "v": PROTOCOL_VERSION,
        "request_id": request_id,
        "gateway_id": "gw-1",
        "received_unix_ms": 1_800_000_000_000,
        "endpoint": "chat.completions",
        "model": "demo",
        "key_id": "key_a",
        "key_name": "team a",
        "stream": True,
        "outcome": "ok",
        "http_status": 200,
        "error_code": None,
        "finish_reason": "stop",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "completion_tokens": 5,
        "attempts": 1,
        "queue_ms": 2.0,
        "ttft_ms": 20.0,
        "total_ms": 100.0,
        "pool": "local",
        "provider": "local",
        "region": "here",
    }
    return RequestRecord(**(values | changes))


def attempt_record(request_id: str, attempt: int = 1, **changes: Any) -> AttemptRecord:
    values: dict[str, Any] = {
        "v": PROTOCOL_VERSION,
        "request_id": request_id,
        "attempt": attempt,
        "worker_id": "w-1",
        "pool": "local",
        "provider": "local",
        "region": "here",
        "tier": "spot",
        "engine": "scripted",
        "model": "demo",
        "started_unix_ms": 1_800_000_000_010,
        "outcome": "ok",
        "error_code": None,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "completion_tokens": 5,
        "queue_ms": 2.0,
        "ttft_ms": 18.0,
        "total_ms": 95.0,
        "usd_per_hour": 0.5,
    }
    return AttemptRecord(**(values | changes))


def request_intent(request_id: str, **changes: Any) -> RequestIntent:
    values: dict[str, Any] = {
        "v": PROTOCOL_VERSION,
        "request_id": request_id,
        "gateway_id": "gw-1",
        "received_unix_ms": 1_800_000_000_000,
        "endpoint": "chat.completions",
        "model": "demo",
        "key_id": "key_a",
        "key_name": "team a",
        "stream": True,
        "prompt_tokens": 10,
    }
    return RequestIntent(**(values | changes))
