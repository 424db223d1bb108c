"""Reads LoRA adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors in one folder.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. An adapter adds s·B·A to the weights of some
linear layers, with s = alpha / rank, or alpha / √rank with `use_rslora`. The tensors' names identify the layers.

Anything ignored here would silently change the answers. So everything else in an adapter is refused: every
configuration key that is not known to be harmless, and every tensor that is not such an A or B.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file

from engine.errors import ConfigError, UnsupportedModel
from engine.model.weights import ADAPTER_PICKLE_NAMES, check_whole, digest_of, refuse_pickles, sha256_of
from engine.types import AdapterInfo

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
_TENSOR_NAME: Final = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<matrix>[AB])\.weight")
_PLAIN_INITS: Final = ("gaussian", "eva", "orthogonal")  # the others change the base's weights
_READ_KEYS: Final = frozenset(
    {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias", "init_lora_weights"}
)
# About training, the base's location, or the choice of layers, which the tensors' names specify.
_HARMLESS_KEYS: Final = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",  # how the base stores its weights: matters only for merging
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter in memory, in its model's dtype."""

    info: AdapterInfo
    weights: dict[str, tuple[Tensor, Tensor]]  # by layer: Aᵀ (in, rank) and s·Bᵀ (rank, out)
    tokenizer: PreTrainedTokenizerBase | None  # if its folder has one


def load_adapter(name: str, path: str, model: PreTrainedModel) -> Adapter:
    """Load an adapter of `model`, whose layers are not yet replaced, from a folder or by its name on the hub.

    Raises ConfigError, naming the adapter and the part that cannot be served.
    """
    try:
        config = json.loads(_file(path, CONFIG_NAME).read_text())
        refuse_pickles(path, ADAPTER_PICKLE_NAMES, unless=WEIGHTS_NAME)
        weights_file = _file(path, WEIGHTS_NAME)
        check_whole([weights_file])
        tensors = load_file(weights_file)
        tokenizer = _load_tokenizer(path)
        _check_config(config)
        weights = _weights(config, tensors, model)
        digest = digest_of(json.dumps(config, sort_keys=True), sha256_of(weights_file))
    except (OSError, ValueError, SafetensorError, UnsupportedModel) as error:
        raise ConfigError(f"adapters.{name}", f"{path}: {error}") from error
    ranks = [a.shape[1] for a, _ in weights.values()]
    size = sum(matrix.nbytes for pair in weights.values() for matrix in pair)
    info = AdapterInfo(name, (min(ranks), max(ranks)), len(weights), size, digest)
    return Adapter(info, weights, tokenizer)


def _file(path: str, name: str) -> Path:
    found = cached_file(path, name)
    if found is None:
        raise OSError(f"{name} does not exist")
    return Path(found)


def _load_tokenizer(path: str) -> PreTrainedTokenizerBase | None:
    if cached_file(path, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False) is None:
        return None
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    return tokenizer


def _check_config(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{CONFIG_NAME}: peft_type = {config.get('peft_type')!r}; only 'LORA' is supported")
    if config.get("bias", "none") != "none":
        raise ValueError(f"{CONFIG_NAME}: bias = {config['bias']!r} is not supported; only 'none' is")
    init = config.get("init_lora_weights", True)
    if not isinstance(init, bool) and init not in _PLAIN_INITS:
        raise ValueError(
            f"{CONFIG_NAME}: init_lora_weights = {init!r} may have changed the base's weights; convert the adapter to "
            "plain LoRA with PEFT (save_pretrained, path_initial_model_for_weight_conversion)"
        )
    for key, value in config.items():
        if value and key not in _READ_KEYS | _HARMLESS_KEYS:
            raise ValueError(f"{CONFIG_NAME}: {key} = {json.dumps(value)} is not supported")


def _weights(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], model: PreTrainedModel
) -> dict[str, tuple[Tensor, Tensor]]:
    pairs = _pairs(tensors)
    if not pairs:
        raise ValueError(f"{WEIGHTS_NAME} has no LoRA tensors")
    weights = {}
    for layer, (a, b) in pairs.items():
        _check_layer(layer, a, b, model)
        rank = _of_layer(config.get("rank_pattern"), layer, config.get("r", 8))
        if a.shape[0] != rank:
            raise ValueError(f"{layer}: rank {a.shape[0]}, but {CONFIG_NAME} says {rank}")
        alpha = _of_layer(config.get("alpha_pattern"), layer, config.get("lora_alpha", 8))
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        weights[layer] = _transposed(a, 1.0, model), _transposed(b, scale, model)
    return weights


def _transposed(matrix: Tensor, scale: float, model: PreTrainedModel) -> Tensor:
    """Return scale · matrixᵀ, contiguous and in the model's dtype."""
    return (matrix.float() * scale).t().contiguous().to(model.dtype)


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Sort the tensors by layer: A (rank, in) and B (out, rank)."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR_NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{WEIGHTS_NAME}: the tensor {name} is not supported; only lora_A and lora_B are")
        found.setdefault(match["layer"], {})[match["matrix"]] = tensor
    for layer, matrices in found.items():
        if len(matrices) < 2:
            raise ValueError(f"{WEIGHTS_NAME}: {layer} has only one of lora_A and lora_B")
    return {layer: (matrices["A"], matrices["B"]) for layer, matrices in found.items()}


def _check_layer(layer: str, a: Tensor, b: Tensor, model: PreTrainedModel) -> None:
    try:
        module = model.get_submodule(layer)
    except AttributeError:
        raise ValueError(f"{type(model).__name__} has no layer {layer}") from None
    if module is model.get_output_embeddings():
        raise ValueError(f"{layer}: adapters of the output layer are not supported")
    if isinstance(module, Conv1D):  # GPT-2's linear layer: its weight is (in, out)
        shape = tuple(module.weight.shape)
    elif type(module) is nn.Linear:
        shape = module.in_features, module.out_features
    else:
        raise ValueError(f"{layer}: adapters of {type(module).__name__} are not supported, only of linear layers")
    if (a.shape[1], b.shape[0]) != shape or a.shape[0] != b.shape[1]:
        raise ValueError(
            f"{layer} maps {shape[0]} to {shape[1]}, but lora_A is {tuple(a.shape)} and lora_B is {tuple(b.shape)}"
        )


def _of_layer(patterns: Mapping[str, float] | None, layer: str, default: float) -> float:
    """Return the value of the first pattern that equals the layer's name or its end, as in PEFT."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default
