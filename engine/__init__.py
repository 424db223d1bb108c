"""Spillway's continuous-batching engine: any causal language model of transformers, many requests in one batch.

It does not depend on NATS, HTTP or Spillway's other packages. The scheduler, the block pool and the records below need
no torch, so `LLMEngine` is loaded on first use.
"""

from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineCorrupted, EngineError, RequestRejected, UnsupportedModel
from engine.types import EngineInfo, EngineLoad, FinishReason, GenerationRequest, ResumePoint, SequenceOutput
from protocol.generation import PromptLogprob, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from engine.engine import LLMEngine

__all__ = [
    "ConfigError",
    "EngineConfig",
    "EngineCorrupted",
    "EngineError",
    "EngineInfo",
    "EngineLoad",
    "FinishReason",
    "GenerationRequest",
    "LLMEngine",
    "PromptLogprob",
    "RequestRejected",
    "ResumePoint",
    "SamplingParams",
    "SequenceOutput",
    "TokenLogprob",
    "UnsupportedModel",
]


def __getattr__(name: str) -> object:
    if name == "LLMEngine":
        from engine.engine import LLMEngine  # noqa: PLC0415 - torch takes a second to import

        return LLMEngine
    raise AttributeError(name)
