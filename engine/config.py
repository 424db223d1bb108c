"""The engine's configuration. Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8"]
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and budgets of one engine; checked on construction.

    `dtype="auto"` means float32 on a CPU, even where bfloat16 would be about twice as fast: in bfloat16 the rounding of
    a batched product depends on the batch, so an answer could depend on the other requests being served. On a GPU it
    means bfloat16, or float16 if the GPU does not support that.
    """

    dtype: DType = "auto"
    device: str = "cpu"  # or "cuda", "cuda:1", …
    quantize: Quantization | None = None  # "int8": linear layers in 8-bit integers, on CPUs that support it
    max_model_len: int | None = None  # tokens of prompt and output; None: the model's limit
    max_sequences: int = 32  # choices in one running batch
    max_waiting: int = 1024  # choices accepted but not yet running
    max_batched_tokens: int = 512  # tokens computed in one step
    # Maximum memory of the KV pool; less is taken if max_sequences can never use it. None: 1 GiB on a CPU; on a GPU,
    # what gpu_memory_utilization leaves beside the weights and the largest batch.
    kv_bytes: int | None = None
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory to use in all, if kv_bytes is None
    cuda_graphs: bool = True  # on a GPU: replay recorded steps when every sequence decodes
    block_size: int = 16  # tokens in one KV block
    lookahead_tokens: int = 64  # growth kept free for each running choice before another is admitted
    prefix_cache: bool = True  # keep the blocks of ended sequences for prompts with the same prefix
    prompt_logits_bytes: int = 128 << 20  # maximum memory for one step's logits of prompts whose logprobs are requested
    draft_tokens: int = 0  # draft tokens computed beside the next token where a text repeats itself; 0: none
    adapters: Mapping[str, str] = field(default_factory=dict)  # LoRA: name → a PEFT folder, or its name on the hub
    # Torch's, within one operation; None: one less than the processors. With as many threads as processors, every other
    # busy process stalls all threads: measured 10 times slower and worse on two shared cores.
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_waiting", "max_batched_tokens", "block_size", "prompt_logits_bytes"):
            _require_positive(name, getattr(self, name))
        for name in ("max_model_len", "kv_bytes", "threads"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        for name in ("lookahead_tokens", "draft_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(name, f"must be at least 0, not {getattr(self, name)}")
        if self.max_batched_tokens < self.max_sequences:
            raise ConfigError("max_batched_tokens", "must be at least max_sequences, or running sequences would starve")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                "gpu_memory_utilization", f"must be above 0 and at most 1, not {self.gpu_memory_utilization}"
            )
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError("device", f"unknown device {self.device!r}; use cpu, cuda, cuda:0, cuda:1, …")


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(name, f"must be at least 1, not {value}")
