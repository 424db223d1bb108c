"""Responses in the background, as their callers read them: again from where a connection broke, at any gateway."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.http_client import Exchange

CREATED = b"event: response.created"


def has_begun(reply: Exchange) -> bool:
    """Return whether a reply has the beginning of a response in the background."""
    return bool(reply.pieces) and reply.pieces[0][1].startswith(CREATED) and b'"background":true' in reply.pieces[0][1]


def events_of(reply: Exchange) -> list[tuple[float, bytes]]:
    """Return the whole events of a reply, with their times of arrival."""
    found: list[tuple[float, bytes]] = []
    rest = b""
    for arrived_s, piece in reply.pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        found += [(arrived_s, event + b"\n\n") for event in events if not event.startswith(b":")]
    return found


def joined(replies: Sequence[Exchange]) -> Exchange:
    """Return what the replies from the last beginning on have brought together, under the name of the first of them."""
    begun = [number for number, reply in enumerate(replies) if has_begun(reply)]
    if not begun:
        return replies[-1]
    parts = replies[begun[-1] :]
    pieces = [event for reply in parts for event in events_of(reply)]
    return replace(parts[-1], due_s=parts[0].due_s, raw_headers=parts[0].raw_headers, pieces=pieces)


def rest_of(replies: Sequence[Exchange]) -> str | None:
    """Return where the rest of a response is to be read; None: it has not begun yet."""
    if not any(map(has_begun, replies)):
        return None
    events = events_of(joined(replies))
    first, last = _data(events[0][1]), _data(events[-1][1])
    return f"/v1/responses/{first['response']['id']}?stream=true&starting_after={last['sequence_number']}"


def _data(event: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(event.split(b"\ndata: ", 1)[1])
    return fields
