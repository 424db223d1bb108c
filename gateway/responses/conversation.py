"""The conversation that a response goes on with, and that it leaves behind."""

from functools import partial
from typing import Any, Final

import msgspec

from gateway.api.openai_items import Item, with_history
from gateway.errors import InvalidParameter
from gateway.responses.kept import Kept
from gateway.responses.messages import Key, Unreadable
from gateway.responses.patience import patiently
from gateway.responses.records import StoredResponse
from gateway.responses.store import ResponseStore
from protocol.wire import PROTOCOL_VERSION

PARAM: Final = "previous_response_id"

_encode = msgspec.json.Encoder().encode


async def continued(store: ResponseStore, previous: Key, body: bytes) -> bytes:
    """Return a body with the conversation of a stored response before its input.

    Raises InvalidParameter, BusError, ProtocolError, and what the store's shares raise.
    """
    try:
        merged = await patiently(lambda: store.read(previous, partial(_continued, body, store.max_body_bytes)))
    except Unreadable as error:
        raise InvalidParameter(f"The previous response cannot be gone on from: {error}.", param=PARAM) from error
    if merged is None:
        hint = "Was it stored ('store': true), and has it ended?"
        message = f"Previous response with id '{previous.response_id}' not found. {hint}"
        raise InvalidParameter(message, param=PARAM, code="previous_response_not_found")
    return merged


def _continued(body: bytes, max_bytes: int, kept: Kept) -> bytes | None:
    if not kept.is_over:
        return None
    merged = with_history(body, kept.items, kept.answer)
    if len(merged) > max_bytes:
        message = f"The conversation has {len(merged)} bytes with this input; a request may have at most {max_bytes}."
        raise InvalidParameter(message, param=PARAM, code="too_large")
    return merged


async def keep(store: ResponseStore, tenant: str, response: dict[str, Any], items: list[Item]) -> None:
    """Store a response that has ended, with its input items. Raises BusError and NotKept."""
    stored = StoredResponse(PROTOCOL_VERSION, _encode(response), _encode(items))
    await patiently(lambda: store.put(Key(tenant, response["id"]), stored))
