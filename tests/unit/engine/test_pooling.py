import random
from pathlib import Path

import pytest
import torch

from engine.errors import ConfigError, RequestRejected
from engine.pooling.pooling import PoolingEngine, _batches_by_length
from engine.pooling.pooling_model import PoolingOptions
from engine.pooling.pooling_types import PoolingInput, PoolingRequest
from tests.unit.engine.pooled_models import (
    HIDDEN,
    MAX_TOKENS,
    VOCABULARY,
    drain,
    make_engine,
    random_inputs,
    request,
    run,
    save_embedder,
    vectors_of,
)

CLOSE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedder(tmp_path_factory.mktemp("bert"), "bert")


@pytest.fixture
def engine(folder: Path) -> PoolingEngine:
    return make_engine(folder, max_sequences=4, max_batched_tokens=MAX_TOKENS)


def test_every_input_is_answered_once_with_its_number(engine: PoolingEngine) -> None:
    inputs = random_inputs(23)
    answers = run(engine, request("r", *inputs))["r"]
    assert sorted(answers) == list(range(23))
    assert {output.finish_reason for output in answers.values()} == {"stop"}
    assert torch.allclose(vectors_of(answers).norm(dim=1), torch.ones(23), atol=CLOSE)


def test_only_the_inputs_given_are_computed(engine: PoolingEngine) -> None:
    inputs = random_inputs(5)
    whole = vectors_of(run(engine, request("r", *inputs))["r"])
    rest = [PoolingInput(i, inputs[i], len(inputs[i])) for i in (1, 4)]
    answers = run(engine, PoolingRequest("rest", "embed", rest))["rest"]
    assert sorted(answers) == [1, 4]
    assert torch.dist(torch.frombuffer(bytearray(answers[4].vector or b""), dtype=torch.float32), whole[4]) < CLOSE


def test_a_small_request_does_not_wait_for_a_large_one(engine: PoolingEngine) -> None:
    engine.add_request(request("large", *[[5] * MAX_TOKENS] * 20))
    engine.step()
    engine.add_request(request("small", [5, 6]))
    seen = [output.request_id for _ in range(2) for output in engine.step()]
    assert "small" in seen
    assert len(drain(engine)["large"]) + seen.count("large") + 1 == 20


def test_an_input_larger_than_the_budget_runs_alone(folder: Path) -> None:
    engine = make_engine(folder, max_sequences=4, max_batched_tokens=8)
    engine.add_request(request("r", [5] * MAX_TOKENS, [6] * 4, [7] * 4))
    assert [output.index for output in engine.step()] == [0]
    assert [output.index for output in engine.step()] == [1, 2]


def test_batches_pad_little() -> None:
    rows = [PoolingInput(i, [5] * n, n) for i, n in enumerate([60, 4, 64, 6, 30, 4])]
    one = PoolingRequest("r", "embed", rows)
    groups = _batches_by_length([(one, row) for row in rows])
    assert [[len(row.token_ids) for _, row in group] for group in groups] == [[4, 4, 6], [30], [60, 64]]


def test_waiting_inputs_can_be_canceled_and_others_continue(engine: PoolingEngine) -> None:
    engine.add_request(request("left", *random_inputs(12)))
    engine.add_request(request("stays", *random_inputs(3)))
    answers = {output.index: output for output in engine.step() if output.request_id == "left"}
    engine.abort("left")
    engine.abort("left")
    engine.abort("nobody")
    rest = drain(engine)
    assert set(answers) | set(rest["left"]) == set(range(12))
    assert {output.finish_reason for output in rest["left"].values()} == {"cancelled"}
    assert {output.finish_reason for output in rest["stays"].values()} == {"stop"}


def test_random_arrivals_and_cancellations_leave_nothing_behind(folder: Path) -> None:
    engine = make_engine(folder, max_sequences=8, max_batched_tokens=128)
    dice = random.Random(1)
    inputs = random_inputs(40)
    alone = vectors_of(run(engine, request("alone", *inputs))["alone"])
    ended: dict[str, set[int]] = {}
    sent: dict[str, list[int]] = {}
    for number in range(120):
        chosen = dice.sample(range(40), dice.randint(1, 9))
        sent[f"r{number}"] = chosen
        ended[f"r{number}"] = set()
        engine.add_request(request(f"r{number}", *[inputs[i] for i in chosen]))
        if dice.random() < 0.3:
            engine.abort(f"r{dice.randint(0, number)}")
        outputs = engine.step() if dice.random() < 0.7 else []
        if number == 119:
            while engine.has_unfinished():
                outputs += engine.step()
        for output in outputs:
            assert output.index not in ended[output.request_id]
            ended[output.request_id].add(output.index)
            if output.vector is not None:
                found = torch.frombuffer(bytearray(output.vector), dtype=torch.float32)
                assert torch.dist(found, alone[sent[output.request_id][output.index]]) < CLOSE
    assert all(ended[name] == set(range(len(chosen))) for name, chosen in sent.items())
    assert not engine._clocks


def test_fewer_dimensions_are_the_first_ones_normalized_again(folder: Path) -> None:
    engine = make_engine(folder, options=PoolingOptions(is_matryoshka=True))
    ids = random_inputs(1)[0]
    whole = vectors_of(run(engine, request("whole", ids))["whole"])[0]
    short = vectors_of(run(engine, request("short", ids, dimensions=8))["short"])[0]
    assert torch.dist(short, whole[:8] / whole[:8].norm()) < CLOSE


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (request("bad", []), "prompt_ids"),
        (request("bad", [5] * (MAX_TOKENS + 1)), "prompt_ids"),
        (request("bad", [5, len(VOCABULARY)]), "prompt_ids"),
        (request("bad", [5], dimensions=HIDDEN + 1), "dimensions"),
        (request("bad", [5], dimensions=HIDDEN - 1), "dimensions"),  # not trained for it
        (request("bad", [5], task="score"), "model"),
    ],
    ids=str,
)
def test_a_refused_request_names_its_field(engine: PoolingEngine, bad: PoolingRequest, field: str) -> None:
    with pytest.raises(RequestRejected) as refused:
        engine.add_request(bad)
    assert refused.value.field == field
    assert not engine.has_unfinished()


def test_a_vector_that_is_not_finite_fails_alone(folder: Path) -> None:
    engine = make_engine(folder)
    table = engine._model._model.embeddings.word_embeddings.weight
    table[7] = float("nan")
    answers = run(engine, request("good", [5, 6]), request("bad", [5, 7]))
    assert (answers["good"][0].finish_reason, answers["bad"][0].finish_reason) == ("stop", "error")


def test_the_longest_input(folder: Path, tmp_path: Path) -> None:
    assert make_engine(folder, max_model_len=16).info.max_model_len == 16
    with pytest.raises(ConfigError, match=f"max_model_len: {MAX_TOKENS + 1} exceeds the model's {MAX_TOKENS}"):
        make_engine(folder, max_model_len=MAX_TOKENS + 1)
    roberta = save_embedder(tmp_path, "roberta")
    with pytest.raises(ConfigError, match=f"max_model_len: {MAX_TOKENS + 1} exceeds the model's {MAX_TOKENS}"):
        make_engine(roberta, max_model_len=MAX_TOKENS + 1)
    (roberta / "sentence_bert_config.json").write_text('{"max_seq_length": 24, "do_lower_case": false}')
    assert make_engine(roberta).info.max_model_len == 24
