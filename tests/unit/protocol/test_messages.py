import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import job as m
from protocol import subjects
from protocol.errors import ProtocolError
from protocol.generation import PromptLogprob, TokenLogprob
from protocol.job import StepFrame, decode_step
from protocol.usage import decode_usage

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=200)


@given(token_ids)
def test_packed_token_ids_round_trip(ids: list[int]) -> None:
    assert m.unpack_token_ids(m.pack_token_ids(ids)) == ids


def test_packed_token_ids_are_little_endian_on_the_wire() -> None:
    assert m.pack_token_ids([1, 256]) == b"\x01\0\0\0\0\x01\0\0"


def test_a_truncated_token_list_is_refused() -> None:
    with pytest.raises(ProtocolError, match="5 bytes"):
        m.unpack_token_ids(b"12345")


def test_every_frame_kind_round_trips() -> None:
    logprob = TokenLogprob(5, "a", -0.5, b"a", ((5, "a", -0.5, b"a"),))
    frames = (
        m.Accepted("r", 1, 0, "w", "p", "aws", "eu", 1.5),
        m.Tokens("r", 1, 1, 0, (5,), "a", None, (logprob,)),
        m.Tokens("r", 1, 2, 0, (2,), "", "stop"),
        m.Tokens(
            "r",
            1,
            2,
            0,
            (),
            "",
            prompt_logprobs=(PromptLogprob(1, "a"), PromptLogprob(2, "b", -1.5, 3, ((5, "c", -0.5),))),
        ),
        m.Finished("r", 1, 3, cancelled=False, prompt_tokens=3, cached_tokens=0, completion_tokens=2, ttft_ms=4.0),
        m.Finished("r", 1, 3, False, 3, 0, 2, 4.0, m.Timings(1.0, 2.0, 3.0, 4)),
        m.Failed("q", 2, 0, "engine_error", "no", retryable=True, param="stop"),
    )
    step = StepFrame(m.PROTOCOL_VERSION, "w", frames)
    assert decode_step(m.encode(step)) == step


def test_a_job_with_resume_points_round_trips() -> None:
    job = m.Job(
        v=m.PROTOCOL_VERSION,
        request_id="r",
        attempt=2,
        model="a/b",
        reply_subject="fr.g",
        sampling=m.Sampling(max_tokens=4, logit_bias={3: -100.0}, stop=("x",)),
        prompt_ids=m.pack_token_ids([1, 2]),
        prompt_tokens=2,
        resume=(m.ResumePoint(0, m.pack_token_ids([9]), 3),),
    )
    assert m.decode_job(m.encode(job)) == job


def test_another_version_is_refused_by_name() -> None:
    payload = m.encode(StepFrame(m.PROTOCOL_VERSION + 1, "w", ()))
    with pytest.raises(ProtocolError, match=f"protocol {m.PROTOCOL_VERSION + 1}"):
        decode_step(payload)


@pytest.mark.parametrize("decode", [m.decode_job, decode_step, m.decode_control, m.decode_heartbeat, decode_usage])
@pytest.mark.parametrize("payload", [b"", b"\xff\xff", b"\x80", msgspec.msgpack.encode(["?", 1])])
def test_garbage_is_a_protocol_error(decode: object, payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload)  # type: ignore[operator]


def test_timings_of_an_older_worker_are_missing() -> None:
    old = ["f", "r", 1, 3, False, 3, 0, 2, 4.0]
    step = decode_step(msgspec.msgpack.encode([m.PROTOCOL_VERSION, "w", [old]]))
    assert step.frames == (m.Finished("r", 1, 3, False, 3, 0, 2, 4.0),)
    assert step.frames[0].timings is None


def test_an_unreadable_frame_does_not_affect_others() -> None:
    before, after = m.Tokens("r", 1, 1, 0, (5,), "a"), m.Tokens("q", 2, 7, 0, (6,), "b")
    for strange, is_known in ((["z", "p", 1, 4, "later"], False), (["t", "p", 1, 4, 0, [-1], "c"], True)):
        wire = [m.PROTOCOL_VERSION, "w", [*map(msgspec.to_builtins, (before,)), strange, msgspec.to_builtins(after)]]
        one, unread, other = decode_step(msgspec.msgpack.encode(wire)).frames
        assert (one, other) == (before, after)
        assert isinstance(unread, m.UnreadableFrame)
        assert (unread.request_id, unread.attempt, unread.seq, unread.is_known) == ("p", 1, 4, is_known)


def test_a_newer_peer_may_append_fields() -> None:
    wire = msgspec.msgpack.decode(m.encode(m.Cancel("r", 1)))
    assert m.decode_control(msgspec.msgpack.encode([*wire, "later"])) == m.Cancel("r", 1)


@given(st.text(min_size=1, max_size=60), st.text(min_size=1, max_size=60))
def test_escaped_names_are_one_token_and_distinct(one: str, other: str) -> None:
    escaped = subjects.escape(one)
    assert not set(escaped) & set(" .*>/\\\t\r\n")
    assert (escaped == subjects.escape(other)) == (one == other)
