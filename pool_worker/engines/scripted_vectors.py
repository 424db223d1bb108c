"""The scripted engine's vectors, computed from the input without a model.

An embedding is a unit vector of components derived from a hash of the token ids; a score is a number from 0 to 1.
"""

import hashlib
import math
import struct
import time

from engine.errors import RequestRejected
from engine.pooling.pooling_types import PoolingInput, PoolingRequest
from engine.step_stats import SequenceClock
from engine.types import FinishReason, SequenceOutput
from pool_worker.settings import ScriptedEngineSettings
from protocol.generation import PoolingCard
from protocol.job import pack_token_ids


class ScriptedInput:
    """One running input: like a ScriptedChoice that ends with its first step."""

    __slots__ = ("_dimensions", "_input", "_request", "clock", "fault", "made", "prompt_tokens", "ready_s")

    def __init__(self, request: PoolingRequest, one: PoolingInput, dimensions: int, fault: str | None) -> None:
        self._request = request
        self._input = one
        self._dimensions = dimensions
        self.fault = fault
        self.made = one.index  # inputs before it
        self.ready_s = 0.0  # monotonic clock
        self.prompt_tokens = len(one.token_ids)
        self.clock = SequenceClock(added_s=time.monotonic())

    @property
    def request_id(self) -> str:
        return self._request.request_id

    def fault_is_due(self) -> bool:
        """Report whether the scripted fault occurs instead of the answer."""
        return self.fault is not None

    def step(self) -> SequenceOutput:
        """Answer it."""
        output = self.end("stop")
        kept = self._request.dimensions or self._dimensions
        output.vector = scripted_vector(self._input, 1 if self._request.task == "score" else kept)
        return output

    def end(self, reason: FinishReason, error: str | None = None) -> SequenceOutput:
        """End without a vector."""
        return SequenceOutput(
            self.request_id, self._input.index, [], "", finish_reason=reason, error=error, timings=self.clock.timings()
        )


def scripted_vector(one: PoolingInput, dimensions: int) -> bytes:
    """Return an input's normalized vector; a single component is a score. Shorter ones are prefixes of longer ones."""
    seed = pack_token_ids(one.token_ids) + pack_token_ids([one.first_tokens])
    draws = hashlib.shake_128(seed).digest(2 * dimensions)
    numbers = [number / 65536 for number in struct.unpack(f"<{dimensions}H", draws)]
    if dimensions == 1:
        return struct.pack("<f", numbers[0])
    centred = [number - 0.5 for number in numbers]
    length = math.sqrt(sum(number * number for number in centred)) or 1.0
    return struct.pack(f"<{dimensions}f", *[number / length for number in centred])


def pooling_card(settings: ScriptedEngineSettings) -> PoolingCard | None:
    """Return what the model makes instead of text; None if it makes text."""
    if settings.task == "generate":
        return None
    return PoolingCard(settings.task, 1 if settings.task == "score" else settings.dimensions, is_matryoshka=True)


def check_pooling(request: PoolingRequest, settings: ScriptedEngineSettings) -> None:
    """Raise RequestRejected, naming the field, as a real engine does."""
    if request.task != settings.task:
        raise RequestRejected("model", f"the model is served for {settings.task}, not for {request.task}")
    if request.dimensions is not None and request.dimensions > settings.dimensions:
        raise RequestRejected("dimensions", f"{request.dimensions} is more than {settings.dimensions}")
    for one in request.inputs:
        if not 0 < len(one.token_ids) <= settings.max_model_len:
            raise RequestRejected("prompt_ids", f"input {one.index} has {len(one.token_ids)} tokens")
