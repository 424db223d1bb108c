"""Payload records with plain defaults."""

import json
from typing import Any

from ledger.payloads.sealing import Sealer
from protocol.job import PROTOCOL_VERSION
from protocol.usage import PayloadRecord


def payload_record(
    request_id: str, *, request: Any = None, answer: Any = None, sealer: Sealer | None = None, **changes: Any
) -> PayloadRecord:
    """``request`` and ``answer``: JSON to seal."""
    sealer = sealer or Sealer()
    fields: dict[str, Any] = {
        "v": PROTOCOL_VERSION,
        "request_id": request_id,
        "received_unix_ms": 1_800_000_000_000,
        "model": "demo",
        "endpoint": "chat.completions",
        "key_id": "key_a",
        "team_id": "team_a",
        "end_user": None,
        "train_ok": True,
        "redacted": True,
        "expires_unix_ms": 4_000_000_000_000,
        "encoding": sealer.encoding,
        "request": sealer.seal(json.dumps(request or {}).encode(), request_id, "request"),
        "answer": sealer.seal(json.dumps(answer or {"choices": []}).encode(), request_id, "answer"),
    }
    if changes.get("dropped"):
        fields["request"] = fields["answer"] = None
    return PayloadRecord(**(fields | changes))
