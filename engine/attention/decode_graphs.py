"""Decoding steps recorded once and replayed: CUDA graphs.

A step in which every sequence computes one token is hundreds of small kernels, and Python takes longer to launch them
than a GPU to run them. So for some batch sizes the step is recorded, with inputs and logits at fixed addresses; a batch
is padded to the next size with unused rows, its inputs are copied there, and the recording is replayed. All other steps
are launched one kernel after the other.

A recorded step must not depend on anything the host would have to read back. A model that does (some mixtures of
experts, rotary scalings by length) runs without recordings.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.attention import Segment, StepInputs
from engine.attention.paged_attention import PagedKVPool

Compute = Callable[[StepInputs], Tensor]  # the model: inputs → logits [rows, vocabulary], on the device
Replay = Callable[[], object]
Recorder = Callable[[Callable[[], None]], Replay]  # runs a function, and returns a function that repeats it

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Recording:
    inputs: StepInputs
    packed: Tensor  # the tensor that `inputs` are views of, except for the tables
    replay: Replay


class DecodeGraphs:
    """One recording for each batch size; they share the tables of pages and the logits."""

    def __init__(
        self,
        pool: PagedKVPool,
        compute: Compute,
        record: Recorder,
        *,
        max_sequences: int,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        """Record the sizes 1, 2, 4, … and `max_sequences`, the largest first, whose memory the smaller ones reuse."""
        self._pool = pool
        self._tables = pool.blank_tables(max_sequences, max_model_len)
        self._logits = torch.empty(max_sequences, vocab_size, dtype=torch.float32, device=self._tables.device)
        self._sizes = sorted({max_sequences, *(1 << power for power in range(max_sequences.bit_length()))})
        self._recordings: dict[int, _Recording] = {}
        for size in reversed(self._sizes):
            self._recordings[size] = self._record(size, compute, record, max_model_len)

    def run(self, tokens: list[int], positions: list[int], segments: list[Segment]) -> Tensor:
        """Compute one row for each of at most `max_sequences` segments.

        Returns float32 logits [rows, vocabulary], which the next run overwrites.
        """
        rows = len(tokens)
        size = self._sizes[bisect_left(self._sizes, rows)]
        recording = self._recordings[size]
        filling = size - rows
        self._fill(
            recording,
            [*tokens, *[0] * filling],
            [*positions, *[0] * filling],
            segments + [self._pool.filling] * filling,
        )
        recording.replay()
        return self._logits[:rows]

    def _record(self, size: int, compute: Compute, record: Recorder, max_model_len: int) -> _Recording:
        inputs, packed = self._pool.make_static_inputs(self._tables[:size], max_model_len)
        recording = _Recording(inputs, packed, lambda: None)
        self._fill(recording, [0] * size, [0] * size, [self._pool.filling] * size)

        def step() -> None:
            self._logits[:size].copy_(compute(inputs))

        return _Recording(inputs, packed, record(step))

    def _fill(self, recording: _Recording, tokens: list[int], positions: list[int], segments: list[Segment]) -> None:
        packed, tables = self._pool.pack(tokens, positions, segments)
        recording.packed.copy_(packed, non_blocking=True)
        self._tables[: len(segments), : tables.shape[1]].copy_(tables, non_blocking=True)


class CudaGraphRecorder:
    """Records as CUDA graphs that share one memory pool; a Recorder."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], None]) -> Replay:
        """Raise RuntimeError where the step makes the host wait, before anything is recorded."""
        step()  # compiles kernels and allocates the libraries' workspaces
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the GPU during the capture.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            step()
        return graph.replay


def record_decoding(
    pool: PagedKVPool,
    compute: Compute,
    record: Recorder,
    *,
    max_sequences: int,
    max_model_len: int,
    vocab_size: int,
) -> DecodeGraphs | None:
    """Return recordings of all batch sizes; None, with a warning logged, if the model or its memory forbids it."""
    try:
        return DecodeGraphs(
            pool,
            compute,
            record,
            max_sequences=max_sequences,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
        )
    except RuntimeError as error:
        log.warning("cannot record CUDA graphs; small batches will decode more slowly: %s", error)
        return None
