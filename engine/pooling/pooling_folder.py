"""Reads a model folder's settings for embeddings and scores.

Formats: sentence-transformers' ``modules.json`` with a folder per module, ``sentence_bert_config.json``, and the keys
that sentence-transformers and vLLM read in ``config.json``.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils.hub import cached_file

from engine.errors import UnsupportedModel
from engine.pooling.pooling_types import PoolingKind

Task = Literal["generate", "embed", "score"]

_CLASSIFIER = "ForSequenceClassification"
_ENCODERS = ("Model", "ForMaskedLM", "ForPreTraining")  # endings of the names of architectures without a text head
_POOLING_KINDS: dict[str, PoolingKind] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_POOLING_NAMES: dict[str, PoolingKind] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class PoolingFolder:
    """The settings declared by the files beside the weights; None: undeclared."""

    pooling: PoolingKind | None = None
    normalize: bool | None = None
    max_tokens: int | None = None  # sequence length used in training, if below the model's limit


def task_of(name: str, requested: Task | None) -> Task:
    """Return a model's task: the requested one if supported, or by default the one that its files declare.

    Raises UnsupportedModel if the model does not support the requested task, OSError if the model is missing.
    """
    architecture = next(iter(AutoConfig.from_pretrained(name).architectures or ()), "")
    if architecture.endswith(_CLASSIFIER):
        possible: tuple[Task, ...] = ("score",)
    elif architecture.endswith(_ENCODERS) and not architecture.endswith("LMHeadModel"):
        possible = ("embed",)
    else:
        has_modules = _read_json(name, "modules.json") is not None
        possible = ("embed", "generate") if has_modules else ("generate", "embed")
    if requested is not None and requested not in possible:
        raise UnsupportedModel(f"task: {architecture or name} is for {' or '.join(possible)}, not for {requested}")
    return requested or possible[0]


def read_pooling_folder(name: str) -> PoolingFolder:
    """Read the files that sentence-transformers wrote beside the weights, if they exist.

    Raises UnsupportedModel for a processing step that is not implemented.
    """
    limits = _read_json(name, "sentence_bert_config.json") or {}
    if limits.get("do_lower_case"):
        raise UnsupportedModel("sentence_bert_config.json: do_lower_case is not supported")
    max_tokens = limits.get("max_seq_length")
    modules = _read_json(name, "modules.json")
    if modules is None:
        return PoolingFolder(max_tokens=max_tokens)
    pooling: PoolingKind | None = None
    normalize = False
    for module in modules:
        kind = str(module["type"]).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling_kind(_read_json(name, f"{module['path']}/config.json") or {})
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise UnsupportedModel(f"modules.json: a module of type {kind} is not supported")
    return PoolingFolder(pooling, normalize, max_tokens)


def score_activation(config: PreTrainedConfig) -> Literal["sigmoid", "identity"]:
    """Return the activation of a cross-encoder's logit. Raises UnsupportedModel for an unknown one."""
    declared = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    declared = declared or getattr(config, "sbert_ce_default_activation_function", None) or "Sigmoid"
    name = str(declared).rpartition(".")[2]
    if name not in {"Sigmoid", "Identity"}:
        raise UnsupportedModel(f"config.json: the activation {declared} is not supported")
    return "sigmoid" if name == "Sigmoid" else "identity"


def matryoshka_of(config: PreTrainedConfig) -> tuple[bool, tuple[int, ...]]:
    """Return whether vectors may be shortened, and to which lengths; empty: any (keys as vLLM reads them)."""
    lengths = tuple(getattr(config, "matryoshka_dimensions", None) or ())
    return bool(lengths) or bool(getattr(config, "is_matryoshka", False)), lengths


def _pooling_kind(config: dict[str, Any]) -> PoolingKind:
    modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    modes += [config["pooling_mode"]] if isinstance(config.get("pooling_mode"), str) else []
    kinds = {(_POOLING_KINDS | _POOLING_NAMES).get(mode) for mode in modes}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None:
        raise UnsupportedModel(f"1_Pooling/config.json: {', '.join(modes) or 'no pooling'} is not supported")
    return kind


def _read_json(name: str, file: str) -> Any:  # noqa: ANN401 - any JSON
    path = cached_file(
        name, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if path is None else json.loads(Path(path).read_text())
