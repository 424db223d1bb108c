"""Every message in msgpack that crosses the queue: only ProtocolError comes out, and what is read is written again."""

from collections.abc import Callable
from typing import Any

import msgspec

from gateway.responses import store
from ledger.webhooks.events import Event, decode_event
from protocol import gateways, usage
from protocol import job as m
from protocol.errors import ProtocolError
from protocol.gateways import decode_account, decode_disconnect
from protocol.job import decode_step
from protocol.usage import (
    decode_dead_letter,
    decode_parked,
    decode_payloads,
    decode_usage,
    encode_usage,
    read_payloads,
    read_usage,
)
from tests.fuzz.mutations import Form
from tests.unit.protocol.test_versions import BEAT, CARD, CONTROLS, FRAMES, JOB, LETTER
from tests.usage_records import attempt_record, request_record

FORM: Form = "msgpack"
V = m.PROTOCOL_VERSION

DECODERS: list[Callable[[bytes], Any]] = [
    m.decode_job,
    m.decode_control,
    m.decode_heartbeat,
    m.decode_model_card,
    decode_step,
    decode_usage,
    decode_payloads,
    decode_parked,
    decode_account,
    usage.decode_still_open,
    usage.decode_open_requests_query,
    gateways.decode_claim,
    gateways.decode_ask,
    gateways.decode_part,
    decode_dead_letter,
    m.decode_chat,
    decode_event,
    store.decode_run,
    store.decode_part,
    store.decode_stored,
    store.decode_question,
]
READERS: list[Callable[[bytes], Any]] = [m.decode_job_head, gateways.decode_lanes, decode_disconnect, read_payloads]

_CHAT = m.Chat(
    (m.Turn("user", "hello"), m.Turn("assistant", None, calls=(m.Call("c", "f", "{}"),))),
    tools=(m.Tool("f", "d", "{}"),),
    tool_choice="auto",
    schema=m.AnswerSchema("{}"),
)
SEEDS = [
    *map(m.encode, [JOB, BEAT, CARD, LETTER, *CONTROLS, [request_record("r")], [attempt_record("r")]]),
    m.encode([V, "w", FRAMES]),
    m.encode_chat(_CHAT),
    m.encode(Event(V, "t", "evt_1", "response.completed", b"{}")),
    m.encode(gateways.Claim("g", "f")),
    m.encode(gateways.Part(gateways.ClaimState.ATTACHED, 200, ((b"a", b"b"),), b"body", True, True)),
    m.encode(store.StoredResponse(V, b"{}", b"[]")),
    m.encode(usage.StillOpen({"r": 4})),
    b'{"client":{"name":"spillway worker w-1"},"reason":"Client Closed"}',
]


def run(payload: bytes) -> None:
    for decode in DECODERS:
        try:
            message = decode(payload)
        except ProtocolError:
            continue
        encoded = msgspec.msgpack.encode(message)
        again = decode(encoded)
        assert again == message or msgspec.msgpack.encode(again) == encoded, (decode, message)  # NaN equals nothing
    for read in READERS:
        try:
            read(payload)
        except ProtocolError:
            continue
    usage, unread = read_usage(payload)
    assert read_usage(encode_usage([m.encode(record) for record in usage])) == (usage, [])
    assert all(part.reason for part in unread)
