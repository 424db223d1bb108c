"""The pooling engine: inputs in, one vector for each out, a batch at a time.

    add_request → choose → group by length → forward → SequenceOutput

Synchronous and not thread-safe, with the same interface as ``LLMEngine``. Requests take turns, one input each, so that
a request with thousands of inputs does not delay a small one; an input is always computed whole.
"""

import os
import time
from collections import OrderedDict, deque
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine.config import EngineConfig
from engine.errors import RequestRejected
from engine.pooling.pooling_model import PooledModel, PoolingOptions, load_pooled_model
from engine.pooling.pooling_types import PoolingInfo, PoolingInput, PoolingRequest, PoolingTask
from engine.step_stats import SequenceClock, StepStats
from engine.types import EngineCounters, EngineStats, FinishReason, SequenceOutput

# Inputs are computed together if the longest has at most this many times the tokens of the shortest.
LIKE_LENGTHS = 1.5

WARM_UP_TOKENS = 128

Chosen = tuple[PoolingRequest, PoolingInput]


class PoolingEngine:
    """One model and its waiting inputs."""

    info: PoolingInfo
    tokenizers: dict[str | None, PreTrainedTokenizerBase]  # as in LLMEngine

    def __init__(self, model: PooledModel, tokenizer: PreTrainedTokenizerBase, config: EngineConfig) -> None:
        torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) - 1))
        self.info = model.info
        self.tokenizers = {None: tokenizer}
        self._model = model
        self._max_inputs = config.max_sequences
        self._max_tokens = config.max_batched_tokens
        self._waiting: OrderedDict[str, tuple[PoolingRequest, deque[PoolingInput]]] = OrderedDict()  # in turn
        self._clocks: dict[str, SequenceClock] = {}  # of each request that has not ended
        self._ready: list[SequenceOutput] = []  # outputs of the next step that need no computation
        self._running = 0  # inputs of the step in progress
        self._counters = EngineCounters()
        self._step_stats = StepStats()

    @classmethod
    def from_pretrained(
        cls, model: str, task: PoolingTask, config: EngineConfig, options: PoolingOptions
    ) -> "PoolingEngine":
        """Load a model by hub name or local path. Raises like ``load_pooled_model``."""
        return cls(*load_pooled_model(model, task, config, options), config)

    def add_request(self, request: PoolingRequest) -> None:
        """Queue a request's inputs. Raises RequestRejected, naming the field, for a request it can never serve."""
        self._check(request)
        if request.request_id in self._waiting:
            raise RequestRejected("request_id", f"{request.request_id!r} is already running")
        if request.inputs:
            self._waiting[request.request_id] = request, deque(request.inputs)
            self._clocks[request.request_id] = SequenceClock(added_s=time.monotonic())

    def abort(self, request_id: str) -> None:
        """Cancel a request; the next step yields "cancelled" for each input that waits. Idempotent."""
        request, inputs = self._waiting.pop(request_id, (None, ()))
        if request is not None:
            self._ready += [self._ended(request, one, "cancelled") for one in inputs]
            del self._clocks[request_id]

    def warm_up(self) -> None:
        """Compute an internal input, so that the first real one does not wait for torch's first-use setup."""
        ids = [token_id % self.info.vocab_size for token_id in range(min(WARM_UP_TOKENS, self.info.max_model_len))]
        self._model.vectors([PoolingInput(0, ids, len(ids))])

    def has_unfinished(self) -> bool:
        """Report whether a step would yield or compute anything."""
        return bool(self._waiting or self._ready)

    def stats(self) -> EngineStats:
        """Return current statistics; may be called from another thread."""
        waiting = sum(len(inputs) for _, inputs in tuple(self._waiting.values()))
        return self._step_stats.snapshot(running=self._running, waiting=waiting, kv_usage=0.0, counters=self._counters)

    def step(self) -> list[SequenceOutput]:
        """Compute one batch; return the outputs of its inputs."""
        outputs, self._ready = self._ready, []
        chosen = self._choose()
        if chosen:
            tokens = sum(len(one.token_ids) for _, one in chosen)
            self._step_stats.step_tokens.observe(tokens)
            self._counters.computed_tokens += tokens
            self._counters.prompt_tokens += tokens
            self._running = len(chosen)
        for group in _batches_by_length(chosen):
            vectors = self._model.vectors([one for _, one in group])
            outputs += [self._output(*chosen, vector) for chosen, vector in zip(group, vectors, strict=True)]
        self._running = 0
        for request_id in {request.request_id for request, _ in chosen}.difference(self._waiting):
            del self._clocks[request_id]
        return outputs

    def _choose(self) -> list[Chosen]:
        """Take the next inputs of the waiting requests, in turn; at least one, however long it is."""
        chosen: list[Chosen] = []
        tokens = 0
        while self._waiting and len(chosen) < self._max_inputs:
            request_id, (request, inputs) = next(iter(self._waiting.items()))
            tokens += len(inputs[0].token_ids)
            if chosen and tokens > self._max_tokens:
                break
            chosen.append((request, inputs.popleft()))
            clock = self._clocks[request_id]
            clock.scheduled_s = clock.scheduled_s or time.monotonic()
            if inputs:
                self._waiting.move_to_end(request_id)
            else:
                del self._waiting[request_id]
        return chosen

    def _output(self, request: PoolingRequest, one: PoolingInput, vector: Tensor) -> SequenceOutput:
        vector = vector[: request.dimensions]
        if request.dimensions is not None and self.info.normalize:
            vector = torch.nn.functional.normalize(vector, dim=0)
        if not bool(torch.isfinite(vector).all()):
            return self._ended(request, one, "error", "the vector is not finite")
        output = self._ended(request, one, "stop")
        output.vector = vector.numpy().tobytes()
        return output

    def _ended(
        self, request: PoolingRequest, one: PoolingInput, reason: FinishReason, error: str | None = None
    ) -> SequenceOutput:
        timings = self._clocks[request.request_id].timings()
        return SequenceOutput(request.request_id, one.index, [], "", finish_reason=reason, error=error, timings=timings)

    def _check(self, request: PoolingRequest) -> None:
        info = self.info
        if request.task != info.task:
            raise RequestRejected("model", f"the model is served for {info.task}, not for {request.task}")
        if request.dimensions is not None and not info.takes_dimensions(request.dimensions):
            raise RequestRejected("dimensions", f"the model does not support {request.dimensions} dimensions")
        for one in request.inputs:
            if not one.token_ids:
                raise RequestRejected("prompt_ids", f"input {one.index} is empty")
            if len(one.token_ids) > info.max_model_len:
                message = (
                    f"input {one.index} has {len(one.token_ids)} tokens; the model's limit is {info.max_model_len}"
                )
                raise RequestRejected("prompt_ids", message)
            if not 0 <= min(one.token_ids) <= max(one.token_ids) < info.vocab_size:
                message = f"input {one.index} has a token id that is not in the vocabulary of {info.vocab_size}"
                raise RequestRejected("prompt_ids", message)


def _batches_by_length(chosen: Iterable[Chosen]) -> list[list[Chosen]]:
    """Group a step's inputs into batches with little padding."""
    groups: list[list[Chosen]] = []
    for one in sorted(chosen, key=lambda chosen: len(chosen[1].token_ids)):
        length = len(one[1].token_ids)
        if not groups or length > LIKE_LENGTHS * len(groups[-1][0][1].token_ids):
            groups.append([])
        groups[-1].append(one)
    return groups
