from typing import Any

import pytest

from engine.pooling.pooling_types import PoolingInput, PoolingRequest
from pool_worker.credit import Cost, Credit
from pool_worker.engines.base import Capacity
from pool_worker.generation import engine_request
from protocol.errors import ProtocolError
from protocol.generation import Pooling
from protocol.job import PROTOCOL_VERSION, Job, ResumePoint, Sampling, decode_job, encode, pack_token_ids


def job(pooling: Pooling, tokens: int = 6, **fields: Any) -> Job:
    prompt = pack_token_ids(range(10, 10 + tokens))
    sampling = Sampling(max_tokens=0)
    return decode_job(encode(Job(PROTOCOL_VERSION, "r", 1, "m", "reply", sampling, prompt, pooling=pooling, **fields)))


def test_a_job_of_several_inputs() -> None:
    pooling = Pooling("embed", pack_token_ids([2, 1, 3]), dimensions=4)
    one = job(pooling)
    assert one.answers == 3
    assert engine_request("r.1", one, list(range(10, 16))) == PoolingRequest(
        "r.1", "embed", [PoolingInput(0, [10, 11], 2), PoolingInput(1, [12], 1), PoolingInput(2, [13, 14, 15], 3)], 4
    )


def test_pairs_and_answered_inputs() -> None:
    pooling = Pooling("score", pack_token_ids([2, 1, 3]), pack_token_ids([1, 1, 2]))
    one = job(pooling, resume=(ResumePoint(0, b"", 0, "stop"), ResumePoint(1, b"", 0, "stop")))
    assert engine_request("r.1", one, list(range(10, 16))) == PoolingRequest(
        "r.1", "score", [PoolingInput(2, [13, 14, 15], 2)]
    )


@pytest.mark.parametrize(
    "pooling",
    [
        Pooling("embed", pack_token_ids([2, 1])),
        Pooling("embed", pack_token_ids([6]), pack_token_ids([1, 2])),
        Pooling("embed", b"abc"),
        Pooling("paint", pack_token_ids([6])),
    ],
    ids=str,
)
def test_an_inconsistent_job_is_refused(pooling: Pooling) -> None:
    with pytest.raises(ProtocolError):
        engine_request("r.1", job(pooling), list(range(10, 16)))


def test_a_job_of_many_inputs_takes_at_most_half_the_engine() -> None:
    credit = Credit(Capacity(max_sequences=8, max_kv_tokens=100, max_model_len=50))
    assert credit.cost_of(job(Pooling("embed", pack_token_ids([6])))) == Cost(1, 6)
    assert credit.cost_of(job(Pooling("embed", pack_token_ids([1] * 300)), tokens=300)) == Cost(1, 50)
