"""Bytes that make decoders raise unexpected exceptions: all become ProtocolErrors, in every message."""

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from protocol import job as m
from protocol.errors import ProtocolError
from protocol.job import EngineStats, Histogram, decode_step
from protocol.usage import RequestRecord, decode_usage, encode_usage, read_usage
from tests.fuzz.wire import DECODERS, READERS
from tests.unit.protocol.test_versions import BEAT
from tests.usage_records import attempt_record, request_record

NESTED = b"\x91" * 1_100 + b"\x90"  # deeper than Python's stack
NOT_UTF8 = b"\xa2\xff\xfe"


def with_field(value: bytes) -> bytes:
    """Return a map with a version and an unknown field."""
    return b"\x82\xa1v\x01\xa3zzz" + value


@pytest.mark.parametrize("poison", [NESTED, NOT_UTF8], ids=["nested", "not-utf-8"])
@pytest.mark.parametrize("decode", [*DECODERS, *READERS])
def test_poison_raises_only_a_protocol_error(decode: Callable[[bytes], Any], poison: bytes) -> None:
    for payload in (poison, with_field(poison), b"\x91" + with_field(poison), b"\x93\x01\xa1w\x91" + poison):
        with contextlib.suppress(ProtocolError):  # skipped text is not decoded
            decode(payload)


@pytest.mark.parametrize("poison", [NESTED, NOT_UTF8], ids=["nested", "not-utf-8"])
def test_a_poisonous_record_does_not_affect_others(poison: bytes) -> None:
    good = m.encode(request_record("good"))
    records, unread = read_usage(encode_usage([good, with_field(poison), good]))
    assert [record.request_id for record in records if isinstance(record, RequestRecord)] in (
        [],
        ["good", "good"],
    )  # nested: its end is unknown
    assert unread


@pytest.mark.parametrize(("decode", "message"), [(m.decode_heartbeat, BEAT), (decode_usage, [attempt_record("r")])])
def test_text_that_is_not_utf_8_is_a_protocol_error(decode: Callable[[bytes], Any], message: Any) -> None:
    """In a known field, where msgspec raises Python's exception."""
    model = msgspec.msgpack.encode("m" * 20)
    fields = msgspec.to_builtins(message)
    (fields[0] if isinstance(fields, list) else fields)["provider"] = "m" * 20
    encoded = msgspec.msgpack.encode(fields)
    assert model in encoded
    decode(encoded)
    with pytest.raises(ProtocolError, match="undecodable"):
        decode(encoded.replace(model, model[:1] + b"\xff" * 20))


def test_a_poisonous_frame_fails_its_step() -> None:
    with pytest.raises(ProtocolError):
        decode_step(b"\x93\x01\xa1w\x91\x95\xa1t\xa1r\x01\x01" + NESTED)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 2**60, -(2**60)])
@pytest.mark.parametrize(
    ("decode", "message", "field"),
    [
        (m.decode_heartbeat, BEAT, "usd_per_hour"),
        (m.decode_heartbeat, BEAT, "tokens_made"),
        (decode_usage, [attempt_record("r")], "usd_per_hour"),
        (decode_usage, [attempt_record("r")], "total_ms"),
        (decode_usage, [attempt_record("r")], "prompt_tokens"),
        (decode_usage, [request_record("r")], "queue_ms"),
    ],
)
def test_numbers_are_finite_and_bounded(
    decode: Callable[[bytes], Any], message: Any, field: str, number: float
) -> None:
    fields = msgspec.to_builtins(message)
    (fields[0] if isinstance(fields, list) else fields)[field] = number
    with pytest.raises(ProtocolError, match=field):
        decode(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    ("bounds", "counts"), [((1.0, 2.0), (1, 1)), ((), ()), ((1.0,), (0, 0, 0)), ((1.0,) * 500, (0,) * 501)]
)
@pytest.mark.parametrize("field", ["step_tokens", "inter_token_s"])
def test_an_inconsistent_histogram_is_refused(field: str, bounds: tuple[float, ...], counts: tuple[int, ...]) -> None:
    none = Histogram((1.0,), (0, 0), 0.0)
    stats = msgspec.to_builtins(EngineStats(1, 0, 0.5, 10, 5, none, none))
    assert m.decode_heartbeat(msgspec.msgpack.encode({**msgspec.to_builtins(BEAT), "stats": stats})).stats is not None
    stats[field] = [bounds, counts, 0.0]
    with pytest.raises(ProtocolError, match=field):
        m.decode_heartbeat(msgspec.msgpack.encode({**msgspec.to_builtins(BEAT), "stats": stats}))
