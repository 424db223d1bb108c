"""A model of transformers that turns each input's token ids into a vector: an encoder, decoder or cross-encoder.

The inputs of a batch are padded on the right and computed by the model's own forward, whose mask hides the padding:
correct for every family, with any kind of attention and positions. Padding costs little because the engine batches
inputs of similar length.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from engine.config import EngineConfig
from engine.device import choose_device, choose_dtype
from engine.errors import ConfigError, UnsupportedModel
from engine.model.model_loader import max_model_len
from engine.model.weights import check_whole, weight_files
from engine.pooling.pooling_folder import PoolingFolder, matryoshka_of, read_pooling_folder, score_activation
from engine.pooling.pooling_types import PoolingInfo, PoolingInput, PoolingKind, PoolingTask

_PROBE_LENGTHS = (3, 11)
# Differences that rounding explains, relative to the vectors' length.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


@dataclass(frozen=True, slots=True)
class PoolingOptions:
    """The operator's settings for a model; None: as its folder declares."""

    pooling: PoolingKind | None = None
    normalize: bool | None = None
    is_matryoshka: bool = False  # even if the folder does not say so


class PooledModel:
    """One model and the pooling of its last hidden states into a vector."""

    def __init__(self, model: PreTrainedModel, info: PoolingInfo) -> None:
        """Raise UnsupportedModel if a vector depends on the rest of its batch."""
        self.info = info
        self._model = model.train(mode=False).requires_grad_(requires_grad=False)
        config = model.config.get_text_config()
        # A decoder's classifier locates its last token by the padding's id, which an input may end with.
        self._head = getattr(model, "score", None) if info.task == "score" else None
        self._body = model if self._head is None else getattr(model, model.base_model_prefix)
        takes = inspect.signature(self._body.forward).parameters
        self._constants = {"use_cache": False} if "use_cache" in takes else {}
        self._has_token_types = "token_type_ids" in takes and getattr(config, "type_vocab_size", 0) > 1
        self._pad_id = getattr(config, "pad_token_id", None) or 0
        self._squash = torch.sigmoid if info.task == "score" and score_activation(config) == "sigmoid" else None
        self._check_padding()

    def vectors(self, inputs: Sequence[PoolingInput]) -> Tensor:
        """Compute one batch; return float32 [inputs, dimensions] in host memory."""
        lengths = torch.tensor([len(one.token_ids) for one in inputs])
        longest = int(lengths.max())
        ids = torch.full((len(inputs), longest), self._pad_id)
        types = torch.zeros_like(ids)
        for row, one in enumerate(inputs):
            ids[row, : len(one.token_ids)] = torch.tensor(one.token_ids)
            types[row, one.first_tokens : len(one.token_ids)] = 1
        device = self._model.device
        mask = (torch.arange(longest)[None] < lengths[:, None]).long().to(device)
        arguments = {"input_ids": ids.to(device), "attention_mask": mask, **self._constants}
        if self._has_token_types:
            arguments["token_type_ids"] = types.to(device)
        with torch.inference_mode():
            return self._forward(arguments, mask).float().cpu()

    def _forward(self, arguments: dict[str, Any], mask: Tensor) -> Tensor:
        output = self._body(**arguments)
        if self.info.pooling is not None:
            vectors = pool(output.last_hidden_state, mask, self.info.pooling)
            return torch.nn.functional.normalize(vectors, dim=-1) if self.info.normalize else vectors
        logits = output.logits if self._head is None else self._head(pool(output.last_hidden_state, mask, "last"))
        return logits if self._squash is None else self._squash(logits.float())

    def _check_padding(self) -> None:
        """Compare a short input's vector computed alone and beside a longer input."""
        probes = [self._probe(length) for length in _PROBE_LENGTHS]
        alone, together = self.vectors(probes[:1])[0], self.vectors(probes)[0]
        error = float((alone - together).norm() / (alone.norm() + 1e-6))
        if not error <= _TOLERANCE[self._model.dtype]:
            raise UnsupportedModel(
                f"{type(self._model).__name__}: beside a longer input, a vector changes by {error:.2g} of its length"
            )

    def _probe(self, length: int) -> PoolingInput:
        first = min(self._pad_id + 1, self.info.vocab_size - length)
        return PoolingInput(0, range(first, first + length), length)


def pool(states: Tensor, mask: Tensor, kind: PoolingKind) -> Tensor:
    """Pool each row's hidden states into a vector: [rows, tokens, H], mask [rows, tokens] → float32 [rows, H]."""
    if kind == "cls":
        return states[:, 0].float()
    if kind == "last":
        return states[torch.arange(len(states), device=states.device), mask.sum(dim=1) - 1].float()
    weights = mask[:, :, None].float()
    return (states.float() * weights).sum(dim=1) / weights.sum(dim=1)


def load_pooled_model(
    name: str, task: PoolingTask, config: EngineConfig, options: PoolingOptions
) -> tuple[PooledModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer by hub name or local path.

    Raises OSError (transformers) if it cannot be found, UnsupportedModel, or ConfigError.
    """
    check_whole(weight_files(name))
    folder = read_pooling_folder(name)
    device = choose_device(config)
    kind = AutoModelForSequenceClassification if task == "score" else AutoModel
    try:
        model = kind.from_pretrained(name, dtype=choose_dtype(config, device), use_safetensors=True).to(device)
    except ValueError as error:
        raise UnsupportedModel(f"{name}: {error}") from error
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{type(model).__name__} is an encoder-decoder model, which is not supported")
    tokenizer = AutoTokenizer.from_pretrained(name)
    info = _info(name, task, model, tokenizer=tokenizer, folder=folder, config=config, options=options)
    return PooledModel(model, info), tokenizer


def _info(
    name: str,
    task: PoolingTask,
    model: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase,
    folder: PoolingFolder,
    config: EngineConfig,
    options: PoolingOptions,
) -> PoolingInfo:
    text_config = model.config.get_text_config()
    is_score = task == "score"
    if is_score and model.config.num_labels != 1:
        raise UnsupportedModel(f"{type(model).__name__} has {model.config.num_labels} labels; only one is supported")
    pooling = options.pooling or folder.pooling or ("last" if _is_decoder(text_config) else "mean")
    declared = True if folder.normalize is None else folder.normalize
    is_matryoshka, lengths = matryoshka_of(model.config)
    return PoolingInfo(
        model=name,
        task=task,
        max_model_len=_max_input_tokens(model, tokenizer, folder, config),
        dimensions=1 if is_score else text_config.hidden_size,
        pooling=None if is_score else pooling,
        normalize=not is_score and (declared if options.normalize is None else options.normalize),
        is_matryoshka=not is_score and (is_matryoshka or options.is_matryoshka),
        matryoshka_dimensions=lengths,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        vocab_size=text_config.vocab_size,
        parameters=model.num_parameters(),
    )


def _is_decoder(config: PreTrainedConfig) -> bool:
    name = config.model_type
    return name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and name not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _max_input_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: PoolingFolder, config: EngineConfig
) -> int:
    """Return the longest input in tokens: the configured length, by default the model's."""
    possible = max_model_len(model.config.get_text_config(), config) - _count_reserved_positions(model, config)
    if config.max_model_len is not None:
        return config.max_model_len
    declared = [limit for limit in (folder.max_tokens, tokenizer.model_max_length) if limit]
    return int(min([possible, *declared]))


def _count_reserved_positions(model: PreTrainedModel, config: EngineConfig) -> int:
    """Return how many positions no token can have: RoBERTa and its descendants count from the padding's id on.

    Raises ConfigError if more is configured than remains.
    """
    tables = [table for name, table in model.named_modules() if name.endswith("position_embeddings")]
    reserved = max(
        [table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None], default=0
    )
    trained = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if reserved and trained and (config.max_model_len or 0) > trained - reserved:
        raise ConfigError("max_model_len", f"{config.max_model_len} exceeds the model's {trained - reserved} tokens")
    return reserved
