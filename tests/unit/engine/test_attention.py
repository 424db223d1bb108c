"""Attention on a CPU equals dense attention for any layout of contexts, with and without the compiled kernel."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.attention.attention import KVPool, Segment
from engine.attention.torch_attention import AttentionOptions
from engine.cpu.attention_kernel import attention_kernel


@dataclass(frozen=True)
class Case:
    """The options of a layer, and the (rows, context) of each sequence of the step."""

    sequences: tuple[tuple[int, int], ...]
    kv_heads: int = 2
    groups: int = 3
    dim: int = 16
    block: int = 4
    pieces: int = 2  # of a context, at most
    shared: int = 0  # common tokens of the sequences
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


MIXED = ((1, 5), (3, 7), (9, 9), (1, 1), (1, 130), (2, 2), (1, 33))
DECODING = ((1, 1), (1, 70), (1, 32), (1, 33), (1, 64), (1, 300))
CHUNKS = ((300, 300), (100, 470), (1, 40), (2, 2), (95, 96), (97, 161))
SHARING = ((1, 90), (1, 81), (1, 300), (4, 120))
CASES = {
    "decoding": Case(DECODING),
    "one sequence": Case(((1, 200),), kv_heads=1, groups=8),
    "mixed": Case(MIXED),
    "chunks": Case(CHUNKS),
    "chunks in many pieces": Case(CHUNKS, pieces=9),
    "chunks with windows": Case(CHUNKS, window=70, sinks=True),
    "chunks with a window of one token": Case(CHUNKS, window=1, pieces=1),
    "chunks of head dimension 80": Case(CHUNKS, dim=80, kv_heads=1, groups=4),
    "chunks of head dimension 128": Case(CHUNKS, dim=128, groups=1),
    "chunks of head dimension 256": Case(CHUNKS, dim=256, kv_heads=1, groups=1),
    "in many pieces": Case(MIXED, pieces=9),
    "one group": Case(MIXED, groups=1),
    "windows": Case(MIXED, window=5),
    "a window of one token": Case(DECODING, window=1),
    "softcap": Case(MIXED, softcap=2.0),
    "sinks": Case(MIXED, sinks=True),
    "shared": Case(SHARING, shared=80),
    "shared, with sinks": Case(SHARING, shared=80, sinks=True),
    "shared, some beyond the window": Case(SHARING, shared=80, window=100),
    "head dimension 64": Case(MIXED, dim=64, kv_heads=3),
    "head dimension 80": Case(DECODING, dim=80),
    "head dimension 128": Case(SHARING, dim=128, shared=64),
    "head dimension 6": Case(MIXED, dim=6),
}


@pytest.fixture(params=["compiled", "torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr("engine.attention.attention.attention_kernel", lambda *_: None)
    return str(request.param)


class Layer:
    """Sequences with their keys and values in a pool that otherwise contains NaN."""

    def __init__(self, case: Case) -> None:
        self._case = case
        torch.manual_seed(0)
        blocks = [-(-context // case.block) for _, context in case.sequences]
        shared_blocks = case.shared // case.block
        self._slots = (sum(blocks) + 2 * len(blocks) * case.pieces) * case.block
        self.pool = KVPool({0: (case.kv_heads, case.dim)}, self._slots, torch.float32)
        for tensor in self.pool.tensors(0):
            tensor.fill_(float("nan"))
        shuffled = random.Random(1)
        first = [range(shared_blocks)] if shared_blocks else []
        at, runs = shared_blocks, []
        for count in blocks:
            cuts = sorted(shuffled.sample(range(1, count - shared_blocks), min(case.pieces, count - shared_blocks) - 1))
            own = []
            for low, high in zip([0, *cuts], [*cuts, count - shared_blocks], strict=True):
                own.append(range(at, at + high - low))
                at += high - low + 1  # the block between two runs is unused
            runs.append(first + shuffled.sample(own, len(own)))
        self.segments = [
            Segment(rows, context, [range(run.start * case.block, run.stop * case.block) for run in own])
            for (rows, context), own in zip(case.sequences, runs, strict=True)
        ]
        common = torch.randn(2, case.kv_heads, case.shared, case.dim)
        self._contexts = [
            torch.cat([common, torch.randn(2, case.kv_heads, context - case.shared, case.dim)], dim=2)
            for _, context in case.sequences
        ]
        for segment, context in zip(self.segments, self._contexts, strict=True):
            before = segment.context - segment.rows
            slots = torch.tensor([slot for run in segment.runs for slot in run][:before], dtype=torch.long)
            self.pool.write(0, slots, context[None, 0, :, :before], context[None, 1, :, :before])
        heads = case.kv_heads * case.groups
        self._queries = [torch.randn(heads, rows, case.dim) for rows, _ in case.sequences]
        sinks = torch.randn(heads) if case.sinks else None
        self.options = AttentionOptions(0.3, case.window, case.softcap, sinks)

    def attend(self, numbers: list[int]) -> list[Tensor]:
        """Run a step with these sequences; return (rows, Hq, D) for each."""
        segments = [self.segments[number] for number in numbers]
        new = [self._contexts[number][:, :, -self.segments[number].rows :] for number in numbers]
        query = torch.cat([self._queries[number] for number in numbers], dim=1)[None]
        key, value = torch.cat(new, dim=2).transpose(1, 2).contiguous().transpose(1, 2)[:, None]  # rows first in memory
        rows = [segment.rows for segment in segments]
        batch = self.pool.stage([0] * sum(rows), [0] * sum(rows), [], segments).batch
        return list(torch.split(batch.attend(0, query, key, value, self.options)[0], rows))

    def expected(self, number: int) -> Tensor:
        """Return dense attention, computed in float64."""
        segment, case = self.segments[number], self._case
        keys, values = self._contexts[number].double().repeat_interleave(case.groups, dim=1)
        scores = self._queries[number].double() @ keys.transpose(1, 2) * self.options.scale
        if case.softcap is not None:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        seen_from = torch.arange(segment.context - segment.rows, segment.context)[:, None]
        distance = seen_from - torch.arange(segment.context)
        visible = (distance >= 0) & (distance < (case.window or segment.context))
        scores = scores.masked_fill(~visible, float("-inf"))
        if self.options.sinks is not None:
            sinks = self.options.sinks.double()[:, None, None].expand(-1, segment.rows, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        attended: Tensor = torch.softmax(scores, dim=-1)[..., : segment.context] @ values
        return attended.transpose(0, 1).float()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", CASES)
def test_it_equals_dense_attention(name: str) -> None:
    layer = Layer(CASES[name])
    numbers = list(range(len(layer.segments)))
    for number, output in zip(numbers, layer.attend(numbers), strict=True):
        torch.testing.assert_close(output, layer.expected(number))


def test_a_steps_keys_and_values_are_available_to_the_next(kernel: str) -> None:
    layer = Layer(CASES["decoding"])
    layer.attend(list(range(len(layer.segments))))
    for segment in layer.segments:
        slots = [slot for run in segment.runs for slot in run][: segment.context]
        for tensor in layer.pool.tensors(0):
            assert torch.isfinite(tensor[:, :, slots]).all(), kernel


def test_a_sequences_result_is_bitwise_independent_of_the_batch() -> None:
    layer = Layer(CASES["decoding"])
    assert attention_kernel(16, torch.float32) is not None
    together = layer.attend([0, 1, 2, 3, 4, 5])
    for number in range(6):
        alone = layer.attend([number])[0]
        assert torch.equal(alone, together[number])


@pytest.mark.usefixtures("kernel")
def test_nan_stays_within_its_sequence() -> None:
    layer = Layer(CASES["decoding"])
    layer._queries[2][:] = float("nan")
    outputs = layer.attend(list(range(6)))
    assert [bool(torch.isfinite(output).all()) for output in outputs] == [True, True, False, True, True, True]


@pytest.mark.usefixtures("kernel")
def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    layer = Layer(CASES["decoding"])
    layer._queries = [query * 1e4 for query in layer._queries]
    for number, output in enumerate(layer.attend(list(range(6)))):
        torch.testing.assert_close(output, layer.expected(number), atol=1e-3, rtol=1e-3)
