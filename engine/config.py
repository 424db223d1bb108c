"""The engine's configuration. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and budgets of one engine; checked when it is made.

    `dtype="auto"` means float32 on a CPU, also where bfloat16 would be about twice as fast: in bfloat16 the rounding
    of a batched product depends on the batch, so that an answer could depend on who else is being served.
    """

    dtype: DType = "auto"
    device: str = "cpu"
    max_model_len: int | None = None  # tokens of prompt and output; None: what the model was trained for
    max_sequences: int = 32  # choices in one running batch
    max_waiting: int = 1024  # choices accepted but not yet running
    max_batched_tokens: int = 512  # tokens computed in one step
    kv_bytes: int = 1 << 30  # most memory the KV pool may take; less is taken where max_sequences can never use it
    block_size: int = 16  # tokens in one KV block
    prefix_cache: bool = True  # keep the blocks of ended sequences for prompts that begin with the same tokens
    draft_tokens: int = 0  # guesses computed beside the next token where a text repeats itself; 0: none
    # Of torch, within one operation; None: all processors but one. With as many threads as processors, every other busy
    # process makes all threads wait for the one it displaced: measured 10 times slower and worse on two shared cores.
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_waiting", "max_batched_tokens", "kv_bytes", "block_size"):
            _require_positive(name, getattr(self, name))
        for name in ("max_model_len", "threads"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        if self.draft_tokens < 0:
            raise ConfigError("draft_tokens", f"must be at least 0, not {self.draft_tokens}")
        if self.max_batched_tokens < self.max_sequences:
            raise ConfigError("max_batched_tokens", "must be at least max_sequences, or running sequences would starve")
        if self.device != "cpu":
            raise ConfigError("device", f"{self.device!r} is not supported by this engine yet; only 'cpu' is")


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(name, f"must be at least 1, not {value}")
