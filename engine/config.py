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

    `dtype="auto"` means float32 on a CPU, also where bfloat16 would be about twice as fast: in bfloat16 the rounding
    of a batched product depends on the batch, so that an answer could depend on the other requests being served. On a
    GPU it means bfloat16, and float16 where the GPU does not support that.
    """

    dtype: DType = "auto"
    device: str = "cpu"  # or "cuda", "cuda:1", …
    quantize: Quantization | None = None  # "int8": linear layers in 8-bit integers, on CPUs made for it
    max_model_len: int | None = None  # tokens of prompt and output; None: what the model was trained for
    max_sequences: int = 32  # choices in one running batch
    max_waiting: int = 1024  # choices accepted but not yet running
    max_batched_tokens: int = 512  # tokens computed in one step
    # Most memory the KV pool may take; less is taken where max_sequences can never use it. None: 1 GiB on a CPU, on a
    # GPU what gpu_memory_utilization leaves beside the weights and the largest batch.
    kv_bytes: int | None = None
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory that is used in all, if kv_bytes does not say
    cuda_graphs: bool = True  # on a GPU, replay recorded steps where every sequence decodes
    block_size: int = 16  # tokens in one KV block
    lookahead_tokens: int = 64  # by which every running choice could grow when memory is short and another is admitted
    prefix_cache: bool = True  # keep the blocks of ended sequences for prompts that begin with the same tokens
    prompt_logits_bytes: int = 128 << 20  # most memory for one step's logits of prompts whose logprobs are wanted
    draft_tokens: int = 0  # guesses computed beside the next token where a text repeats itself; 0: none
    adapters: Mapping[str, str] = field(default_factory=dict)  # LoRA: name → a PEFT folder, or its name on the hub
    # Of torch, within one operation; None: all processors but one. With as many threads as processors, every other busy
    # process makes all threads wait for the one it displaced: measured 10 times slower and worse on two shared cores.
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
                "gpu_memory_utilization", f"must be above 0, at most 1, not {self.gpu_memory_utilization}"
            )
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError("device", f"{self.device!r} is unknown; use cpu, cuda, cuda:0, cuda:1, …")


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(name, f"must be at least 1, not {value}")
