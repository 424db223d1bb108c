"""Loads a causal language model of transformers and verifies that this engine computes it correctly.

The check compares results instead of names: the model's own forward with transformers' eager attention is the
reference, and the packed forward must agree with it. A model that keeps state outside the KV pool (state-space and
convolution layers, shared caches) disagrees and is refused.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from engine.attention.attention import (
    ATTENTION_NAME,
    Segment,
    StepInputs,
    packed_attention,
)
from engine.attention.kv_memory import make_kv_memory
from engine.attention.torch_attention import AttentionOptions
from engine.config import EngineConfig, Quantization
from engine.cpu.attention_kernel import begin_compiling
from engine.cpu.native import compiling
from engine.cpu.panel_kernel import PANELS_SOURCE
from engine.cpu.row_kernels import ROWS_SOURCE
from engine.device import choose_device, choose_dtype
from engine.errors import ConfigError, UnsupportedModel
from engine.model.linear import check_quantization
from engine.model.projections import make_fast, watch_siblings
from engine.model.row_modules import speed_up_rows
from engine.model.weights import check_whole, weight_files

_OTHER_ENGINE = "use a pool with another engine (vLLM, or a remote server) for it"
_PROBE_TOKENS = 12
# Differences that rounding explains, relative to the logits' spread (Euclidean norms). Wrong attention gives about 1.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
_QUANTIZED_TOLERANCE = 0.4


def load_model(name: str, config: EngineConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load weights and tokenizer by hub name or local path.

    Raises OSError (transformers) if they cannot be found; UnsupportedModel if it is not a causal model, or its weights
    are not safetensors or are incomplete; ConfigError if the device is not available.
    """
    check_whole(weight_files(name))
    device = choose_device(config)
    dtype = choose_dtype(config, device)
    if device.type == "cpu" and dtype is torch.float32:
        for source in (ROWS_SOURCE, PANELS_SOURCE):
            compiling(source)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, attn_implementation="eager", use_safetensors=True
        )
    except ValueError as error:
        raise UnsupportedModel(f"{name}: {error}") from error
    return model, AutoTokenizer.from_pretrained(name)


class KVProbe:
    """Runs one sequence's attention as a packed batch would, recording each layer's shapes and options."""

    def __init__(self) -> None:
        self.layer_shapes: dict[int, tuple[int, int]] = {}  # layer → (Hkv, D)
        self.windows: set[int | None] = set()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Record the layer's shapes; return query (1, Hq, T, D) as the output (1, T, Hq, D)."""
        if key.shape != value.shape:
            raise UnsupportedModel(f"keys and values differ in shape (latent attention); {_OTHER_ENGINE}")
        self.layer_shapes[layer] = (key.shape[1], key.shape[3])
        self.windows.add(options.window)
        return query.transpose(1, 2)  # the values do not matter here


def prepare_model(
    model: PreTrainedModel, block_size: int, quantize: Quantization | None = None
) -> dict[int, tuple[int, int]]:
    """Switch the model to packed attention and fast linear layers, in place; return the stored layer → (Hkv, D).

    The model must be on its final device, and is checked with that device's KV memory. Raises UnsupportedModel if the
    packed forward fails or differs from the model's own; ConfigError for `quantize`.
    """
    check_quantization(quantize, device=model.device.type, dtype=model.dtype)
    _refuse_by_declaration(model)
    model.train(mode=False).requires_grad_(requires_grad=False)
    prompt = _probe_prompt(model)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        reference = model(input_ids=prompt, use_cache=False).logits[0].float()
        speed_up_rows(model)
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    model.set_attn_implementation(ATTENTION_NAME)
    with watch_siblings(model) as siblings:
        layer_shapes = _probe_layers(model)
    if model.device.type == "cpu":
        for _, head_dim in layer_shapes.values():
            begin_compiling(head_dim, model.dtype)
    make_fast(model, siblings, quantize)
    error = _difference_from_reference(model, prompt, layer_shapes, reference, block_size)
    if not error <= (_QUANTIZED_TOLERANCE if quantize else _TOLERANCE[model.dtype]):
        raise UnsupportedModel(
            f"{type(model).__name__}: packed and plain forward differ by {error:.2g} of the logits' spread, so it "
            f"keeps state outside its attention; {_OTHER_ENGINE}"
        )
    return layer_shapes


def probe_rows(model: PreTrainedModel, layers: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of those layers of a prepared model that do not compute all rows of a packed batch.

    Experts, for example: each gets only the tokens routed to it.
    """
    rows: dict[str, set[int]] = {name: set() for name in layers}

    def note(name: str, inputs: Tensor) -> None:
        rows[name].add(inputs.numel() // inputs.shape[-1])

    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs[0]))
        for name, layer in layers.items()
    ]
    _probe(model, KVProbe())
    for hook in hooks:
        hook.remove()
    return [name for name, counts in rows.items() if counts != {_PROBE_TOKENS}]


def max_model_len(text_config: PreTrainedConfig, config: EngineConfig) -> int:
    """Return the longest sequence, in tokens, that is served. Raises ConfigError if more was configured."""
    trained = getattr(text_config, "max_position_embeddings", None)
    limits = [trained, *_rope_limits(text_config)]
    limit = min((length for length in limits if length), default=None)
    if config.max_model_len is None:
        if limit is None:
            raise ConfigError("max_model_len", "the model does not declare its context length; set max_model_len")
        return int(limit)
    if limit is not None and config.max_model_len > limit:
        raise ConfigError("max_model_len", f"{config.max_model_len} exceeds the model's {limit} tokens")
    return config.max_model_len


def _rope_limits(text_config: PreTrainedConfig) -> list[int]:
    """Return the lengths up to which rotary frequencies do not depend on the batch's longest sequence."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    changing = [rope for rope in per_layer_type if rope.get("rope_type") in ("dynamic", "longrope")]
    trained = getattr(text_config, "max_position_embeddings", None)
    return [length for rope in changing if (length := rope.get("original_max_position_embeddings") or trained)]


def _refuse_by_declaration(model: PreTrainedModel) -> None:
    name = type(model).__name__
    text_config = model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{name} does not allow its attention to be replaced; {_OTHER_ENGINE}")
    if getattr(text_config, "kv_lora_rank", None):
        raise UnsupportedModel(f"{name} uses multi-head latent attention; {_OTHER_ENGINE}")
    kinds = set(getattr(text_config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModel(f"{name} has layers of kind {', '.join(sorted(kinds))}; {_OTHER_ENGINE}")


def _probe_prompt(model: PreTrainedModel) -> Tensor:
    return torch.arange(_PROBE_TOKENS).remainder(model.config.get_text_config().vocab_size)[None].to(model.device)


def _probe(model: PreTrainedModel, probe: KVProbe) -> None:
    positions = torch.arange(_PROBE_TOKENS, device=model.device)[None]
    _packed_forward(model, StepInputs(_probe_prompt(model), positions, positions[0], probe))


def _probe_layers(model: PreTrainedModel) -> dict[int, tuple[int, int]]:
    probe = KVProbe()
    _probe(model, probe)
    text_config = model.config.get_text_config()
    if len(probe.layer_shapes) != text_config.num_hidden_layers:
        raise UnsupportedModel(
            f"{type(model).__name__}: {len(probe.layer_shapes)} of {text_config.num_hidden_layers} layers use "
            f"attention that this engine can serve; {_OTHER_ENGINE}"
        )
    # The comparison below is too short to reveal a window: a model that masks with one but does not pass it is refused.
    if _masks_with_window(text_config) and probe.windows == {None}:
        raise UnsupportedModel(f"{type(model).__name__} does not pass its window to its attention; {_OTHER_ENGINE}")
    return probe.layer_shapes


def _masks_with_window(text_config: PreTrainedConfig) -> bool:
    if "sliding_attention" in (getattr(text_config, "layer_types", None) or ()):
        return True
    used = getattr(text_config, "use_sliding_window", True) is not False
    layers_differ = getattr(text_config, "layer_types", None) is not None
    return used and not layers_differ and getattr(text_config, "sliding_window", None) is not None


def _difference_from_reference(
    model: PreTrainedModel,
    prompt: Tensor,
    layer_shapes: dict[int, tuple[int, int]],
    reference: Tensor,
    block_size: int,
) -> float:
    """Compute the prompt twice in one batch, in chunks of different sizes; return the relative error, at most 1."""
    dtype = model.dtype
    slots = -(-_PROBE_TOKENS // block_size) * block_size  # of each copy
    memory = make_kv_memory(layer_shapes, 2 * slots, block_size, dtype, model.device)
    runs = [[range(slots)], [range(slots, 2 * slots)]]
    token_ids = prompt[0].tolist()
    rows: list[list[Tensor]] = [[], []]
    done = [0, 0]
    for sizes in ((5, 1), (1, 7), (6, 4)):
        spans = [(done[i], done[i] + size) for i, size in enumerate(sizes)]
        segments = [Segment(end - first, end, runs[i]) for i, (first, end) in enumerate(spans)]
        tokens = [token for first, end in spans for token in token_ids[first:end]]
        positions = [position for first, end in spans for position in range(first, end)]
        logits = _packed_forward(model, memory.stage(tokens, positions, list(range(len(tokens))), segments))
        for i, part in enumerate(torch.split(logits, list(sizes))):
            rows[i].append(part.float())
        done = [end for _, end in spans]
    spread = float((reference - reference.mean(dim=-1, keepdim=True)).norm()) + 1e-6
    return max(float((torch.cat(part) - reference).norm()) for part in rows) / spread


def _packed_forward(model: PreTrainedModel, inputs: StepInputs) -> Tensor:
    with torch.inference_mode():
        output = model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            use_cache=False,
            packed_batch=inputs.batch,
        )
    logits: Tensor = output.logits[0]
    return logits
