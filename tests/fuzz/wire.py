"""Every message in msgpack that crosses the queue: only ProtocolError comes out, and what is read is written again."""

from collections.abc import Callable
from typing import Any

import msgspec

from gateway.responses import records
from ledger.webhooks.events import Event, decode_event
from protocol import chat, idempotency, lanes, open_requests
from protocol import messages as m
from protocol.dead_letters import decode_dead_letter
from protocol.disconnects import decode_disconnect
from protocol.errors import ProtocolError
from protocol.parked import decode_parked
from protocol.payloads import decode_payloads, read_payloads
from protocol.quotas import decode_account
from protocol.steps import decode_step
from protocol.usage import decode_usage, encode_usage, read_usage
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
    open_requests.decode_answer,
    open_requests.decode_ask,
    idempotency.decode_claim,
    idempotency.decode_ask,
    idempotency.decode_part,
    decode_dead_letter,
    chat.decode_chat,
    decode_event,
    records.decode_run,
    records.decode_part,
    records.decode_stored,
    records.decode_question,
]
READERS: list[Callable[[bytes], Any]] = [m.decode_job_head, lanes.decode_lanes, decode_disconnect, read_payloads]

_CHAT = chat.Chat(
    (chat.Turn("user", "hello"), chat.Turn("assistant", None, calls=(chat.Call("c", "f", "{}"),))),
    tools=(chat.Tool("f", "d", "{}"),),
    tool_choice="auto",
    schema=chat.AnswerSchema("{}"),
)
SEEDS = [
    *map(m.encode, [JOB, BEAT, CARD, LETTER, *CONTROLS, [request_record("r")], [attempt_record("r")]]),
    m.encode([V, "w", FRAMES]),
    chat.encode_chat(_CHAT),
    m.encode(Event(V, "t", "evt_1", "response.completed", b"{}")),
    m.encode(idempotency.Claim("g", "f")),
    m.encode(idempotency.Part(idempotency.ClaimState.ATTACHED, 200, ((b"a", b"b"),), b"body", True, True)),
    m.encode(records.StoredResponse(V, b"{}", b"[]")),
    m.encode(open_requests.StillOpen({"r": 4})),
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
