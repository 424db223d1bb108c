"""Lines of batches: those of an uploaded file, and those that are made of POST /v1/messages/batches."""

import hashlib
import json

import msgspec

from gateway.batches.anthropic_routes import ENDPOINT, _Requests
from gateway.batches.lines import Request, Wrong, check_line, prompt_text, sort_key
from gateway.errors import Refused
from gateway.settings import BatchSettings
from tests.fuzz.driving import cut_bytes
from tests.fuzz.mutations import Form

FORM: Form = "json"
MODELS = {"m": "configured"}
CHAT = "/v1/chat/completions"
_SETTINGS = BatchSettings()
_BODY = {"model": "m", "messages": [{"role": "user", "content": "hello \u00e9"}], "max_tokens": 5}

SEEDS = [
    json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": _BODY}).encode(),
    json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": {**_BODY, "tools": [{"n": [1.5]}]}}).encode(),
    json.dumps({"custom_id": "a", "method": "POST", "url": ENDPOINT, "body": {**_BODY, "system": "s"}}).encode(),
    json.dumps({"requests": [{"custom_id": "a", "params": _BODY}, {"custom_id": "b", "params": _BODY}]}).encode(),
    json.dumps(
        {"x": [{}], "requests": [{"custom_id": "a", "params": {**_BODY, "system": "a\r\n"}}]}, indent=1
    ).encode(),
]


def run(payload: bytes) -> None:
    for endpoint in (CHAT, ENDPOINT):
        try:
            _index(check_line(payload, endpoint, MODELS))
        except Wrong:
            continue
    whole, cut = _lines(payload, len(payload) or 1), _lines(payload, cut_bytes(payload))
    assert whole == cut, "what a body says depends on how it was cut"
    for line in whole or ():
        # A line with as many values in strings as a body may have in all is refused later, and no other.
        request = check_line(line, ENDPOINT, MODELS, any_model=True)
        _index(request)


def _index(request: Request) -> None:
    """Do with a line what the index does."""
    assert request.estimated_tokens is not None
    hashlib.blake2b(request.custom_id.encode())
    sort_key(request.model, prompt_text(request.body))
    encoded = msgspec.json.encode(request)
    assert msgspec.json.decode(encoded, type=Request) == request


def _lines(payload: bytes, piece_bytes: int) -> list[bytes] | None:
    """Return the lines of a body that comes in pieces; None: it was refused."""
    requests, lines = _Requests(_SETTINGS), list[bytes]()
    starts = range(0, max(1, len(payload)), piece_bytes)
    try:
        for start in starts:
            lines += requests.feed(payload[start : start + piece_bytes], is_last=start == starts[-1])
    except Refused:
        return None
    return lines
