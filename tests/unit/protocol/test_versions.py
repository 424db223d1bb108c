"""Messages of the next release, read by this one, for every message and every order of upgrades.

The next release may append fields, add kinds, and raise the version of a changed message. docs/how-to/upgrades.md says
what this release must do with each; the tests of each process check how it does it.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from protocol import job as m
from protocol.errors import NewerVersion, ProtocolError
from protocol.gateways import Account, decode_account
from protocol.job import decode_step
from protocol.usage import (
    DeadLetter,
    ParkedUsage,
    decode_dead_letter,
    decode_parked,
    decode_payloads,
    decode_usage,
    encode_payloads,
    encode_usage,
    read_usage,
)
from tests.payload_records import payload_record
from tests.usage_records import attempt_record, request_record

Decode = Callable[[bytes], Any]

NEXT = m.PROTOCOL_VERSION + 1
JOB = m.Job(m.PROTOCOL_VERSION, "r", 1, "a/b", "fr.g", m.Sampling(max_tokens=4), m.pack_token_ids([1]), prompt_tokens=1)
BEAT = m.Heartbeat(m.PROTOCOL_VERSION, "w", "p", "x", "eu", "spot", "e", ("m",), 0.5, 4, 400, 4, 400, 0, 1, 2)
CARD = m.ModelCard(m.PROTOCOL_VERSION, "a/b", 512, "t.json", None)
LETTER = DeadLetter(m.PROTOCOL_VERSION, "r", "g", "m", "t", "k", 1, m.Sampling(max_tokens=1), 1, 2, ())
MAPS: list[tuple[Any, Decode]] = [
    (JOB, m.decode_job),  # gateway → worker
    (BEAT, m.decode_heartbeat),  # worker → gateway, worker, ledger
    (CARD, m.decode_model_card),  # worker → gateway
    (Account(m.PROTOCOL_VERSION, period="total:", spent_nano_usd=7), decode_account),  # gateway → gateway
    (LETTER, decode_dead_letter),  # gateway → command line
    (ParkedUsage(m.PROTOCOL_VERSION, b"x", "why", 1), decode_parked),  # ledger → ledger
]
LISTS: list[tuple[Any, Callable[[bytes], bytes], Decode]] = [
    (request_record("r"), lambda record: encode_usage([record]), decode_usage),  # gateway → ledger
    (attempt_record("r"), lambda record: encode_usage([record]), decode_usage),  # worker → ledger
    (payload_record("r"), lambda record: b"\x91" + record, decode_payloads),  # gateway → ledger
]
FRAMES: list[m.Frame] = [
    m.Accepted("r", 1, 0, "w", "p", "aws", "eu", 1.5, "spot"),
    m.Dropped("r", 1, 1, ("top_k",)),
    m.Tokens("r", 1, 1, 0, (5,), "a", "stop"),
    m.Vector("r", 1, 1, 0, b"1234"),
    m.Finished("r", 1, 2, False, 1, 0, 1, 1.0, m.Timings(1.0, 2.0, 3.0, 4)),
    m.Failed("r", 1, 0, "engine_error", "no", retryable=True),
]
CONTROLS: list[m.Control] = [m.Cancel("r", 1), m.Resend("r", 1, 0, "fr.g"), m.Ping(), m.Drain()]


def name_of(value: object) -> str | None:
    return None if callable(value) else type(value).__name__


def fields_of(message: Any) -> dict[str, Any]:
    return dict(msgspec.msgpack.decode(m.encode(message)))


@pytest.mark.parametrize(("message", "decode"), MAPS, ids=name_of)
def test_further_fields_are_ignored_and_the_next_version_is_recognized(message: Any, decode: Decode) -> None:
    fields = fields_of(message)
    assert decode(msgspec.msgpack.encode(fields | {"later": {"a": [1]}})) == message
    changed = {name: ["another", "shape"] for name in fields if name != "v"}
    for newer in (fields | {"v": NEXT}, changed | {"v": NEXT}):
        with pytest.raises(NewerVersion, match=f"protocol {NEXT}"):
            decode(msgspec.msgpack.encode(newer))
    with pytest.raises(ProtocolError) as broken:
        decode(msgspec.msgpack.encode(changed | {"v": m.PROTOCOL_VERSION}))
    assert not isinstance(broken.value, NewerVersion)


@pytest.mark.parametrize(("record", "listed", "decode"), LISTS, ids=name_of)
def test_further_fields_and_versions_of_records_in_lists(
    record: Any, listed: Callable[[bytes], bytes], decode: Decode
) -> None:
    fields = fields_of(record)
    assert decode(listed(msgspec.msgpack.encode(fields | {"later": 1}))) == [record]
    for newer in (fields | {"v": NEXT}, fields | {"v": NEXT, "request_id": 7}):
        with pytest.raises(NewerVersion):
            decode(listed(msgspec.msgpack.encode(newer)))


def test_lists_have_the_form_that_these_tests_assume() -> None:
    record = payload_record("r")
    assert encode_payloads([record]) == b"\x91" + m.encode(record)


@pytest.mark.parametrize(
    "strange",
    [
        fields_of(request_record("later")) | {"v": NEXT},
        fields_of(request_record("later")) | {"v": NEXT, "completion_tokens": {"text": 1}},
        {"type": "later", "v": m.PROTOCOL_VERSION, "request_id": "later"},
        {"type": "later", "v": NEXT},
        ["no", "map"],
    ],
)
def test_an_unreadable_usage_record_does_not_affect_others(strange: Any) -> None:
    one, other, unknown = request_record("one"), attempt_record("other"), msgspec.msgpack.encode(strange)
    read, [unread] = read_usage(encode_usage([m.encode(one), unknown, m.encode(other)]))
    assert read == [one, other]
    assert unread.message == encode_usage([unknown])


@pytest.mark.parametrize("frame", FRAMES, ids=name_of)
def test_frames_may_have_further_fields_and_be_of_unknown_kinds(frame: m.Frame) -> None:
    known = msgspec.msgpack.decode(m.encode(frame))
    unknown = ["later", "r", 1, 3, {"a": 1}]
    step = decode_step(msgspec.msgpack.encode([m.PROTOCOL_VERSION, "w", [[*known, "later"], unknown, known], "later"]))
    first, unread, last = step.frames
    assert first == last == frame
    assert isinstance(unread, m.UnreadableFrame)
    assert (unread.request_id, unread.attempt, unread.seq, unread.is_known) == ("r", 1, 3, False)


@pytest.mark.parametrize("frames", [[], [["t", "another", "shape"]], {"another": "shape"}])
def test_a_step_of_the_next_version_is_recognized(frames: Any) -> None:
    with pytest.raises(NewerVersion):
        decode_step(msgspec.msgpack.encode([NEXT, "w", frames]))


@pytest.mark.parametrize("control", CONTROLS, ids=name_of)
def test_controls_may_have_further_fields(control: m.Control) -> None:
    fields = msgspec.msgpack.decode(m.encode(control))
    assert m.decode_control(msgspec.msgpack.encode([*fields, "later"])) == control
    with pytest.raises(ProtocolError):  # of an unknown kind: the worker logs and ignores it
        m.decode_control(msgspec.msgpack.encode(["later", *fields[1:]]))


def test_an_unreadable_job_still_names_its_gateway() -> None:
    newer = fields_of(JOB) | {"v": NEXT, "sampling": "another shape"}
    assert m.decode_job_head(msgspec.msgpack.encode(newer)) == m.JobHead("r", 1, "fr.g")
