"""A model prepared for serving, with its adapters, its vocabularies and its limits."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.attention.kv_memory import CPU_KV_BYTES, kv_tokens_within
from engine.config import EngineConfig
from engine.gpu_memory import kv_bytes_beside
from engine.model.adapter_files import load_adapter
from engine.model.lora import AdapterRows, attach_adapters
from engine.model.model_loader import max_model_len, prepare_model
from engine.text.vocabulary import Vocabulary
from engine.types import AdapterInfo, EngineInfo

LayerShapes = dict[int, tuple[int, int]]  # layer → (Hkv, D)


@dataclass(frozen=True, slots=True)
class ServingModel:
    """The model that the engine runs, with everything the engine needs to know about it."""

    info: EngineInfo
    layer_shapes: LayerShapes
    adapter_rows: AdapterRows
    tokenizers: dict[str | None, PreTrainedTokenizerBase]  # of the model (None), and of adapters that have their own
    vocabularies: dict[str | None, Vocabulary]  # of the model (None) and of each adapter


def make_serving_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: EngineConfig, device: torch.device, name: str
) -> ServingModel:
    """Move the model to the device and replace its attention and linear layers, in place.

    Raises UnsupportedModel or ConfigError.
    """
    model.to(device)
    parameters = model.num_parameters()
    adapters = [load_adapter(adapter, path, model) for adapter, path in config.adapters.items()]
    layer_shapes = prepare_model(model, config.block_size, config.quantize)
    adapter_rows = attach_adapters(model, adapters)
    tokenizers: dict[str | None, PreTrainedTokenizerBase] = {None: tokenizer}
    own = Vocabulary(model, tokenizer)
    vocabularies: dict[str | None, Vocabulary] = {None: own}
    for adapter in adapters:
        if adapter.tokenizer is not None:
            tokenizers[adapter.info.name] = adapter.tokenizer
        vocabularies[adapter.info.name] = own.of_adapter(adapter.tokenizer)
    info = _engine_info(
        model,
        config,
        layer_shapes=layer_shapes,
        eos_token_ids=own.eos_token_ids,
        parameters=parameters,
        name=name,
        adapters=tuple(adapter.info for adapter in adapters),
    )
    return ServingModel(info, layer_shapes, adapter_rows, tokenizers, vocabularies)


def _engine_info(
    model: PreTrainedModel,
    config: EngineConfig,
    *,
    layer_shapes: LayerShapes,
    eos_token_ids: tuple[int, ...],
    parameters: int,
    name: str,
    adapters: tuple[AdapterInfo, ...],
) -> EngineInfo:
    text_config = model.config.get_text_config()
    length = max_model_len(text_config, config)
    kv_bytes = config.kv_bytes
    if kv_bytes is None and model.device.type == "cuda":
        kv_bytes = kv_bytes_beside(model, layer_shapes, config, length)
    return EngineInfo(
        model=name,
        max_model_len=length,
        max_sequences=config.max_sequences,
        kv_tokens=kv_tokens_within(kv_bytes or CPU_KV_BYTES, config, layer_shapes, model.dtype, length),
        eos_token_ids=eos_token_ids,
        dtype=str(model.dtype).removeprefix("torch."),
        quantize=config.quantize,
        device=str(model.device),
        vocab_size=text_config.vocab_size,
        parameters=parameters,
        adapters=adapters,
    )
