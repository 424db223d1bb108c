"""Configuration of Spillway's own engine for models that return vectors instead of text."""

from typing import Final

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.pooling.pooling_folder import Task
from engine.pooling.pooling_model import PoolingOptions
from engine.pooling.pooling_types import PoolingInfo
from pool_worker.engines.base import Capacity
from pool_worker.settings import LocalEngineSettings
from protocol.generation import PoolingCard

# Number of full steps that a worker holds: steps are always full, and other jobs stay available to other workers.
STEPS_HELD: Final = 16

_VECTOR_KEYS: Final = ("pooling", "normalize", "matryoshka")
_TEXT_KEYS: Final = (
    "kv_mib", "kv_overcommit", "prefix_cache", "draft_tokens", "adapters", "quantize", "cuda_graphs",
    "gpu_memory_utilization", "sleep_after_s",
)  # fmt: skip


def refuse_settings_of_other_tasks(settings: LocalEngineSettings, task: Task) -> None:
    """Raise ConfigError, naming the key, for a setting that has no effect on the task."""
    others = {"generate": _VECTOR_KEYS, "embed": _TEXT_KEYS, "score": (*_TEXT_KEYS, *_VECTOR_KEYS)}[task]
    for name in others:
        if getattr(settings, name) != LocalEngineSettings.model_fields[name].default:
            raise ConfigError(name, f"has no effect on the task {task!r}")


def pooling_options(settings: LocalEngineSettings) -> PoolingOptions:
    """Translate the settings."""
    return PoolingOptions(settings.pooling, settings.normalize, is_matryoshka=settings.matryoshka)


def pooling_capacity(config: EngineConfig, info: PoolingInfo) -> Capacity:
    """Return how much may wait in the worker. A waiting input uses no engine memory."""
    tokens = max(STEPS_HELD * config.max_batched_tokens, 2 * info.max_model_len)
    return Capacity(config.max_sequences, tokens, info.max_model_len)


def pooling_card(info: PoolingInfo) -> PoolingCard:
    """Return the description of the model's vectors for gateways."""
    return PoolingCard(info.task, info.dimensions, info.is_matryoshka, info.matryoshka_dimensions)
