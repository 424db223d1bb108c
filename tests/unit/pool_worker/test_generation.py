"""A job as an engine request."""

from collections.abc import Collection
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from engine.types import ResumePoint
from pool_worker.attempt import Attempt
from pool_worker.credit import Cost
from pool_worker.generation import billed_prompt_tokens_of, chat_request, generation_request, sampling_params
from protocol import job as m
from protocol.errors import ProtocolError
from protocol.generation import Pooling
from protocol.job import Chat, Turn, encode_chat
from protocol.nats.pull import Delivery

SAMPLING = m.Sampling(max_tokens=7, temperature=0.3, stop=("a", "b"))
DEFAULTS: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "top_k": 20.0, "min_p": 0.05, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("honoured", "kept"),
    [(DEFAULTS, set(DEFAULTS)), ({"temperature", "top_p", "seed"}, {"temperature", "top_p"}), ((), set())],
)
def test_a_models_defaults_apply_where_the_engine_supports_them(honoured: Collection[str], kept: set[str]) -> None:
    job = m.Job(m.PROTOCOL_VERSION, "r", 1, "m", "fr.g", m.Sampling(max_tokens=16, defaults=DEFAULTS), b"")
    expected = replace(job.sampling, **{name: DEFAULTS[name] for name in kept})
    made = generation_request("r.1", job, [1], (), honoured).sampling
    assert made == expected
    assert type(made.top_k) is int, "engines count with it"
    assert chat_request("r.1", job, encode_chat(Chat((Turn("user", "Hi"),))), honoured).sampling == expected


def test_an_older_worker_reads_the_job_without_the_model_s_defaults() -> None:
    """Its release does not know the field: it uses the API's own defaults, as before, and refuses nothing."""
    job = m.Job(m.PROTOCOL_VERSION, "r", 1, "m", "fr.g", m.Sampling(max_tokens=16, defaults=DEFAULTS), b"")
    read = msgspec.msgpack.decode(m.encode(job))
    del read["sampling"]["defaults"]
    assert sampling_params(m.decode_job(msgspec.msgpack.encode(read)).sampling) == m.Sampling(max_tokens=16)
    assert b"defaults" not in m.encode(m.Sampling(max_tokens=16)), "as it was"


def test_resume_points_arrive_unpacked() -> None:
    resume = (m.ResumePoint(1, m.pack_token_ids([4, 5]), 2),)
    job = m.Job(m.PROTOCOL_VERSION, "r", 2, "m", "fr.g", SAMPLING, b"", resume=resume, scored_tokens=2)
    request = generation_request("r.2", job, [1, 2, 3])
    assert (request.request_id, request.prompt_ids) == ("r.2", [1, 2, 3])
    assert request.resume == (ResumePoint(1, (4, 5), 2),)
    assert request.scored_tokens == 2


def test_the_cache_salt_is_passed() -> None:
    job = m.Job(m.PROTOCOL_VERSION, "r", 1, "m", "fr.g", SAMPLING, b"", cache_salt="salt")
    assert generation_request("r.1", job, [1]).cache_salt == "salt"
    assert chat_request("r.1", job, encode_chat(Chat((Turn("user", "Hi"),)))).cache_salt == "salt"
    assert b"cache_salt" not in m.encode(m.Job(m.PROTOCOL_VERSION, "r", 1, "m", "fr.g", SAMPLING, b"")), "as it was"


def test_the_markup_locates_content() -> None:
    sampling = m.Sampling(max_tokens=7, stop=("a",), markup=m.Markup("hermes", "think", begins_in_reasoning=True))
    job = m.Job(m.PROTOCOL_VERSION, "r", 1, "m", "fr.g", sampling, b"")
    finder = generation_request("r.1", m.decode_job(m.encode(job)), [1]).content_finder
    assert finder is not None
    assert finder().push("So.</think>Hi", is_last=True) == [(11, 13)]
    assert generation_request("r.1", replace(job, sampling=SAMPLING), [1]).content_finder is None
    assert b"markup" not in m.encode(SAMPLING), "as it was"


def test_a_truncated_resume_point_is_a_protocol_error() -> None:
    job = m.Job(m.PROTOCOL_VERSION, "r", 2, "m", "fr.g", SAMPLING, b"", resume=(m.ResumePoint(0, b"12345", 0),))
    with pytest.raises(ProtocolError):
        generation_request("r.2", job, [])


def test_the_jobs_model_chooses_the_adapter() -> None:
    adapters = {"support-bot", "other"}
    for model, adapter in (("support-bot", "support-bot"), ("base", None)):
        job = m.Job(m.PROTOCOL_VERSION, "r", 1, model, "fr.g", SAMPLING, b"")
        assert generation_request("r.1", job, [1], adapters).adapter == adapter
        assert generation_request("r.1", job, [1]).adapter is None


def test_a_hosted_api_bills_each_choices_prompt_and_partial_output() -> None:
    resume = (m.ResumePoint(0, m.pack_token_ids([4, 5]), 2), m.ResumePoint(1, m.pack_token_ids([6]), 1, "stop"))
    sampling = m.Sampling(max_tokens=7, n=3)
    job = m.Job(m.PROTOCOL_VERSION, "r", 2, "m", "fr.g", sampling, m.pack_token_ids([1] * 10), resume=resume)
    assert billed_prompt_tokens_of(job) == 10 + 2 + 10  # of choices 0 and 2; 1 has ended
    delivery = Delivery(b"", "rq.m.hosted-api", "$JS.ACK", 1, 1, 0, 0)
    assert Attempt(job, delivery, Cost(3, 9)).prompt_tokens == 10
    assert Attempt(msgspec.structs.replace(job, hosted=("openai",)), delivery, Cost(3, 9)).prompt_tokens == 22
    pooling = Pooling("embed", m.pack_token_ids([5, 5]))
    assert billed_prompt_tokens_of(msgspec.structs.replace(job, pooling=pooling, resume=())) == 10
