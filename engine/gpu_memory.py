"""The GPU memory available to the KV pool: the configured share minus the weights and the largest step."""

import torch
from transformers import PreTrainedModel

from engine.attention.attention import Segment
from engine.attention.kv_memory import bytes_per_token, make_kv_memory
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_runner import compute_logits
from engine.sampler import SamplingRow, sample
from engine.scheduler import Sequence
from protocol.generation import SamplingParams


def kv_bytes_beside(
    model: PreTrainedModel, layer_shapes: dict[int, tuple[int, int]], config: EngineConfig, max_model_len: int
) -> int:
    """Measure the largest step on the model's GPU, and return the bytes that remain for the KV pool.

    Raises ConfigError if none are.
    """
    device = model.device
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    pool_bytes = run_largest_step(model, layer_shapes, config, max_model_len)
    peak = torch.cuda.max_memory_allocated(device) - before - pool_bytes
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if config.cuda_graphs:
        peak += 4 * config.max_sequences * model.config.get_text_config().vocab_size  # their own logits
    return kv_bytes_available(total, free, peak, config.gpu_memory_utilization)


def kv_bytes_available(total_bytes: int, free_bytes: int, step_bytes: int, utilization: float) -> int:
    """Return the bytes that remain of the GPU memory's share. Raises ConfigError if none remain."""
    used_bytes = total_bytes - free_bytes  # weights, the CUDA context, other processes
    left = int(total_bytes * utilization) - used_bytes - step_bytes
    if left <= 0:
        used, step, share = (size / 2**30 for size in (used_bytes, step_bytes, total_bytes * utilization))
        raise ConfigError(
            "gpu_memory_utilization",
            f"no memory left for the KV pool: {used:.1f} GiB are in use and the largest step takes {step:.1f} GiB "
            f"of {share:.1f} GiB; lower max_batched_tokens or max_sequences, or raise gpu_memory_utilization",
        )
    return left


@torch.inference_mode()
def run_largest_step(
    model: PreTrainedModel, layer_shapes: dict[int, tuple[int, int]], config: EngineConfig, max_model_len: int
) -> int:
    """Compute max_batched_tokens and sample max_sequences of them, using every sampling feature.

    Returns the size in bytes of the KV memory allocated for it, which is free again.
    """
    vocab_size = model.config.get_text_config().vocab_size
    tokens = config.max_batched_tokens
    lengths = [min(max_model_len, tokens - first) for first in range(0, tokens, max_model_len)]
    slots = -(-max_model_len // config.block_size) * config.block_size  # of each sequence
    pool = make_kv_memory(layer_shapes, slots * len(lengths), config.block_size, model.dtype, model.device)
    segments = [
        Segment(length, length, [range(number * slots, (number + 1) * slots)]) for number, length in enumerate(lengths)
    ]
    scored = min(tokens, config.max_sequences + config.prompt_logits_bytes // (4 * vocab_size))
    positions = [position for length in lengths for position in range(length)]
    logits = compute_logits(model, pool.stage([0] * tokens, positions, list(range(scored)), segments)).float()
    # With a top_p this close to 1 the sampler sorts the whole vocabulary.
    params = SamplingParams(temperature=1.0, top_p=0.999999, logprobs=0)
    row = SamplingRow(params, 0, Sequence([0], 1, 2), frozenset(), vocab_size, device=model.device)
    sample(logits[: config.max_sequences], [row] * min(scored, config.max_sequences))
    return (slots * len(lengths) + config.block_size) * bytes_per_token(layer_shapes, model.dtype)
