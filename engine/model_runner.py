"""Runs the model over one step's chunks, packed into one row."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention.attention import KVMemory, Segment, StepInputs
from engine.attention.decode_graphs import DecodeGraphs, Recorder, record_decoding
from engine.attention.paged_attention import PagedKVPool
from engine.model.lora import AdapterRows
from engine.scheduler import Chunk


class ModelRunner:
    """The model and its KV pool, both on one device."""

    def __init__(self, model: PreTrainedModel, pool: KVMemory, block_size: int, adapter_rows: AdapterRows) -> None:
        self._model = model
        self._adapter_rows = adapter_rows
        self._pool = pool
        self._block_size = block_size
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def record_decoding(self, record: Recorder, *, max_sequences: int, max_model_len: int, vocab_size: int) -> None:
        """Record the steps in which every sequence has one row, for replay, if pool and model support it."""
        if isinstance(self._pool, PagedKVPool):
            self._graphs = record_decoding(
                self._pool,
                lambda inputs: compute_logits(self._model, inputs),
                record,
                max_sequences=max_sequences,
                max_model_len=max_model_len,
                vocab_size=vocab_size,
            )

    def forward(self, chunks: list[Chunk]) -> Tensor:
        """Compute the chunks and return float32 logits [rows, vocabulary].

        A chunk that samples has a row for its last token and one for each token of its draft, in the chunks' order.
        After all of these come the rows of prompt tokens whose logits are needed (`Chunk.unscored`). The next forward
        may overwrite them.
        """
        tokens: list[int] = []
        positions: list[int] = []
        sampled_rows: list[int] = []
        scored_rows: list[int] = []
        adapter_rows: dict[str, list[int]] = {}
        for chunk in chunks:
            sequence, draft_tokens = chunk.sequence, chunk.draft_tokens
            first, end = sequence.computed_tokens, sequence.computed_tokens + chunk.tokens
            first_row = len(tokens)
            scored_rows += [first_row + position - first for position in chunk.unscored]
            tokens += sequence.token_ids[first:end]
            if chunk.samples:
                sampled_rows += range(len(tokens) - 1, len(tokens) + draft_tokens)
            tokens += sequence.draft[:draft_tokens]
            positions += range(first, end + draft_tokens)
            if sequence.adapter is not None:
                adapter_rows.setdefault(sequence.adapter, []).extend(range(first_row, len(tokens)))
        self._adapter_rows.set(adapter_rows, self._model.device)
        segments = [self._segment(chunk) for chunk in chunks]
        is_decoding = len(sampled_rows) == len(chunks) == len(tokens) and not scored_rows
        if self._graphs is not None and is_decoding and not adapter_rows:
            return self._graphs.run(tokens, positions, segments)
        inputs = self._pool.stage(tokens, positions, sampled_rows + scored_rows, segments)
        return compute_logits(self._model, inputs).float()

    def _segment(self, chunk: Chunk) -> Segment:
        size = self._block_size
        runs = [range(run.start * size, run.stop * size) for run in chunk.sequence.block_runs]
        rows = chunk.tokens + chunk.draft_tokens
        return Segment(rows, chunk.sequence.computed_tokens + rows, runs)


def compute_logits(model: PreTrainedModel, inputs: StepInputs) -> Tensor:
    """Run a prepared model; return the logits [R, vocabulary] of `sampled_rows`, in the model's dtype."""
    logits: Tensor = model(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        use_cache=False,
        logits_to_keep=inputs.sampled_rows,
        packed_batch=inputs.batch,
    ).logits
    return logits[0]
