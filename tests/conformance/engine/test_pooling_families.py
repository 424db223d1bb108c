"""Vectors and scores equal transformers' own, for each family and in any batch."""

from pathlib import Path

import pytest
import torch

from engine.errors import UnsupportedModel
from engine.pooling.pooling_folder import task_of
from engine.pooling.pooling_model import PoolingOptions
from tests.unit.engine.pooled_models import (
    DECODERS,
    FAMILIES,
    MAX_TOKENS,
    make_engine,
    random_inputs,
    reference_embedding,
    reference_logit,
    request,
    run,
    save_embedder,
    save_scorer,
    vectors_of,
)

CLOSE = 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = save_embedder(tmp_path, family)
    engine = make_engine(folder)
    kind = "last" if family in DECODERS else "mean"
    assert (engine.info.pooling, engine.info.max_model_len) == (kind, MAX_TOKENS)
    inputs = [
        *random_inputs(6),
        random_inputs(1, seed=2, longest=1)[0],
        (random_inputs(40, seed=3)[0] * 64)[:MAX_TOKENS],
    ]
    found = vectors_of(run(engine, request("r", *inputs))["r"])
    for ids, vector in zip(inputs, found, strict=True):
        assert torch.dist(vector, reference_embedding(folder, ids, kind)) < CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_changes_nothing(family: str, tmp_path: Path) -> None:
    engine = make_engine(save_embedder(tmp_path, family))
    ids = random_inputs(1, seed=7)[0]
    alone = vectors_of(run(engine, request("alone", ids))["alone"])[0]
    others = random_inputs(30, seed=8)
    among = vectors_of(run(engine, request("among", *others[:15], ids, *others[15:]))["among"])[15]
    assert torch.dist(alone, among) < CLOSE


@pytest.mark.parametrize("kind", ["cls", "mean", "last"])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_folder_determines_the_pooling(kind: str, normalize: bool, tmp_path: Path) -> None:
    key = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken"}[kind]
    folder = save_embedder(tmp_path, "bert", pooling=key, normalize=normalize)
    inputs = random_inputs(4)
    found = vectors_of(run(make_engine(folder), request("r", *inputs))["r"])
    for ids, vector in zip(inputs, found, strict=True):
        assert torch.dist(vector, reference_embedding(folder, ids, kind, normalize=normalize)) < CLOSE * 10


def test_settings_override_the_folders_pooling(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path, "bert", pooling="pooling_mode_mean_tokens")
    engine = make_engine(folder, options=PoolingOptions(pooling="cls", normalize=False))
    ids = random_inputs(1)[0]
    found = vectors_of(run(engine, request("r", ids))["r"])[0]
    assert torch.dist(found, reference_embedding(folder, ids, "cls", normalize=False)) < CLOSE * 10


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "qwen3", "llama"])
def test_scores_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = save_scorer(tmp_path, family)
    engine = make_engine(folder, "score")
    inputs = [ids for ids in random_inputs(12, seed=5) if len(ids) > 1]
    firsts = [len(ids) // 2 for ids in inputs]
    found = vectors_of(run(engine, request("r", *inputs, first_tokens=firsts, task="score"))["r"])
    assert found.shape == (len(inputs), 1)
    for ids, first, score in zip(inputs, firsts, found[:, 0].tolist(), strict=True):
        logit = torch.tensor(reference_logit(folder, ids, first))
        assert score == pytest.approx(float(torch.sigmoid(logit)), abs=CLOSE)


def test_the_second_text_has_its_own_token_type(tmp_path: Path) -> None:
    engine = make_engine(save_scorer(tmp_path, "bert"), "score")
    ids = [2, 5, 6, 3, 7, 8, 3]
    found = vectors_of(run(engine, request("r", ids, ids, first_tokens=[4, 7], task="score"))["r"])
    assert abs(float(found[0] - found[1])) > CLOSE


def test_a_decoders_score_uses_its_last_token_even_if_it_is_the_padding_token(tmp_path: Path) -> None:
    engine = make_engine(save_scorer(tmp_path, "qwen3"), "score")
    ids = [5, 6, 0]
    long = random_inputs(1, seed=1)[0][:4]
    alone = vectors_of(run(engine, request("r", ids, task="score"))["r"])[0]
    assert torch.dist(alone, vectors_of(run(engine, request("s", ids, long, task="score"))["s"])[0]) < CLOSE
    assert torch.dist(alone, vectors_of(run(engine, request("t", ids[:2], task="score"))["t"])[0]) > CLOSE


@pytest.mark.parametrize(
    "declared",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
    ids=str,
)
def test_a_cross_encoder_may_return_its_raw_logit(declared: dict[str, object], tmp_path: Path) -> None:
    folder = save_scorer(tmp_path, "bert", **declared)
    ids = random_inputs(1)[0]
    found = vectors_of(run(make_engine(folder, "score"), request("r", ids, task="score"))["r"])[0]
    assert float(found) == pytest.approx(reference_logit(folder, ids, len(ids)), abs=CLOSE)


def test_a_models_task(tmp_path: Path) -> None:
    encoder = str(save_embedder(tmp_path / "e", "bert"))
    decoder = str(save_embedder(tmp_path / "d", "qwen3"))
    scorer = str(save_scorer(tmp_path / "s", "bert"))
    assert [task_of(name, None) for name in (encoder, decoder, scorer)] == ["embed", "embed", "score"]
    with pytest.raises(UnsupportedModel, match="BertModel is for embed, not for generate"):
        task_of(encoder, "generate")
    with pytest.raises(UnsupportedModel, match="BertForSequenceClassification is for score, not for embed"):
        task_of(scorer, "embed")


def test_unsupported_pooling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="2 labels"):
        make_engine(save_scorer(tmp_path / "two", "bert", num_labels=2), "score")
    folder = save_embedder(tmp_path / "max", "bert", pooling="pooling_mode_max_tokens")
    with pytest.raises(UnsupportedModel, match="pooling_mode_max_tokens"):
        make_engine(folder)
    modules = (folder / "modules.json").read_text().replace("models.Normalize", "models.Dense")
    (folder / "modules.json").write_text(modules.replace("models.Pooling", "models.Transformer"))
    with pytest.raises(UnsupportedModel, match="a module of type Dense"):
        make_engine(folder)
