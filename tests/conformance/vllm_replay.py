"""The part of vLLM's package that a worker uses in its own process, as published in vLLM 0.32, around a hash.

The source: vllm/v1/engine/async_llm.py, vllm/engine/arg_utils.py, vllm/sampling_params.py, vllm/outputs.py and
vllm/exceptions.py of that version. Unknown names are errors here, too. ``faults`` replaces the answers of the next
requests: a function that raises, or returns the number of tokens before it falls silent. ``real_servers`` runs the
real vLLM.
"""

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, Final

from tests.conformance.replay_events import steps

KV_TOKENS: Final = 4000


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class StructuredOutputsParams:
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    json_object: bool | None = None


@dataclass
class SamplingParams:
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None


@dataclass
class AsyncEngineArgs:
    model: str
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    disable_log_stats: bool = False
    dtype: str = "auto"


class VLLMError(Exception):
    pass


class VLLMClientError(VLLMError):
    pass


class EngineDeadError(VLLMError):
    pass


@dataclass
class VllmReplay:
    """An installed package, which is its own engine: its requests, and the faults of its next requests."""

    kind: str = "vllm_inprocess"
    faults: deque[Callable[[], int]] = field(default_factory=deque)
    bodies: list[SamplingParams] = field(default_factory=list)
    prompts: list[dict[str, Any]] = field(default_factory=list)
    started: list[AsyncEngineArgs] = field(default_factory=list)
    is_healthy: bool = True
    token_s: float = 0.0
    streams: int = 0  # running streams

    def forget(self) -> None:
        """Reset."""
        vars(self).update(vars(VllmReplay()) | {"streams": self.streams})

    @contextlib.contextmanager
    def installed(self) -> Iterator["VllmReplay"]:
        """Be the result of ``import vllm``."""
        modules: dict[str, dict[str, Any]] = {
            "vllm.engine.arg_utils": {"AsyncEngineArgs": AsyncEngineArgs},
            "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=self._start)},
            "vllm.sampling_params": {
                one.__name__: one for one in (SamplingParams, StructuredOutputsParams, RequestOutputKind)
            },
            "vllm.exceptions": {"VLLMError": VLLMError, "VLLMClientError": VLLMClientError},
        }
        for name, content in modules.items():
            sys.modules[name] = module = ModuleType(name)
            module.__dict__.update(content)
        try:
            yield self
        finally:
            for name in modules:
                del sys.modules[name]

    def _start(self, arguments: AsyncEngineArgs) -> "VllmReplay":
        self.started.append(arguments)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(model=arguments.model, max_model_len=arguments.max_model_len or 200),
            scheduler_config=SimpleNamespace(max_num_seqs=arguments.max_num_seqs or 256),
            cache_config=SimpleNamespace(kv_cache_size_tokens=KV_TOKENS),
        )
        return self

    @property
    def errored(self) -> bool:
        return not self.is_healthy

    def shutdown(self) -> None:
        self.is_healthy = True

    async def generate(
        self, prompt: dict[str, Any], sampling_params: SamplingParams, request_id: str
    ) -> AsyncIterator[SimpleNamespace]:
        self.bodies.append(sampling_params)
        assert prompt.keys() <= {"prompt_token_ids", "cache_salt"}
        self.prompts.append(prompt)
        assert sampling_params.output_kind is RequestOutputKind.DELTA
        come = self.faults.popleft()() if self.faults else None
        self.streams += 1
        try:
            async for output in self._outputs(prompt["prompt_token_ids"], sampling_params, come):
                yield output
        finally:
            self.streams -= 1

    async def _outputs(
        self, ids: list[int], params: SamplingParams, come: int | None
    ) -> AsyncIterator[SimpleNamespace]:
        made = steps(ids, params.max_tokens or 0, vars(params), params.logprobs, params.stop_token_ids or ())
        for place, step in enumerate(made):
            if place == come:
                await asyncio.Event().wait()
            await asyncio.sleep(self.token_s)
            if self.errored:
                raise EngineDeadError("EngineCore encountered an issue.")
            likely = {id_: SimpleNamespace(logprob=logprob) for id_, logprob in step.top}
            logprobs = None if params.logprobs is None else [likely]
            choice = SimpleNamespace(token_ids=[step.id], logprobs=logprobs, finish_reason=step.end)
            yield SimpleNamespace(outputs=[choice], num_cached_tokens=None if place else 0)
