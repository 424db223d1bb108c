"""The conversation that a response goes on with, and that it leaves behind."""

from typing import Any, Final

import msgspec

from protocol.wire import PROTOCOL_VERSION
from response_store.patience import patiently
from response_store.records import StoredResponse
from response_store.store import Key, ResponseStore
from surfaces.responses import Item
from web.errors import InvalidParameter

USABLE: Final = ("completed", "incomplete")  # the states of a response that another may go on from

_encode = msgspec.json.Encoder().encode


class _Previous(msgspec.Struct):
    status: str
    output: list[dict[str, Any]]


async def history_of(store: ResponseStore, previous: Key) -> list[Item]:
    """Return the items of a stored response's conversation, its output included.

    Raises InvalidParameter, BusError and ProtocolError.
    """
    stored = await patiently(lambda: store.get(previous))
    if stored is None:
        hint = "Was it stored ('store': true), and has it ended?"
        message = f"Previous response with id '{previous.response_id}' not found. {hint}"
        raise InvalidParameter(message, param="previous_response_id", code="previous_response_not_found")
    response = msgspec.json.decode(stored.response, type=_Previous)
    if response.status not in USABLE:
        message = f"The previous response is '{response.status}': there is nothing to go on from."
        raise InvalidParameter(message, param="previous_response_id")
    items: list[Item] = msgspec.json.decode(stored.items)
    return [*items, *response.output]


async def keep(store: ResponseStore, tenant: str, response: dict[str, Any], items: list[Item]) -> None:
    """Store a response that has ended, with its input items. Raises BusError and NotKept."""
    stored = StoredResponse(PROTOCOL_VERSION, _encode(response), _encode(items))
    await patiently(lambda: store.put(Key(tenant, response["id"]), stored))
