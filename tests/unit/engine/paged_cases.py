"""Layers and steps for tests of paged attention."""

import random
from dataclasses import dataclass

import torch

from engine.attention.attention import Segment
from engine.attention.paged_attention import PagedBatch, PagedKVPool, PagedStep
from engine.attention.torch_attention import AttentionOptions

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """The options of a layer, and the (rows, context) of each sequence of the step."""

    sequences: tuple[tuple[int, int], ...]
    kv_heads: int = 2
    groups: int = 2
    dim: int = 16
    page_size: int = 4
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    splits: int = 1
    dtype: torch.dtype = torch.float32


RAGGED = ((1, 5), (3, 7), (9, 9), (1, 1), (1, 30), (2, 2), (1, 17))
DECODING = ((1, 1), (1, 70), (1, 16), (1, 33))
CASES = {
    "decoding": Case(DECODING),
    "decoding in splits": Case(DECODING, splits=3),
    "more splits than keys": Case(DECODING, splits=8, dim=64, dtype=torch.float16),
    "split windows and sinks": Case(DECODING, splits=4, window=21, sinks=True),
    "mixed": Case(RAGGED),
    "mixed in splits": Case(RAGGED, splits=2, page_size=1),
    "windows": Case(RAGGED, window=5, groups=1),
    "a window of one token": Case(RAGGED, window=1),
    "softcap": Case(RAGGED, softcap=2.0, splits=2),
    "sinks": Case(RAGGED, sinks=True),
    "everything": Case(RAGGED, window=6, softcap=3.0, sinks=True, splits=2, groups=3, dtype=torch.float16),
    "a chunk of many tiles": Case(((150, 170), (1, 3), (70, 70))),
    "one program for all heads": Case(RAGGED, kv_heads=1, groups=24),
    "five groups": Case(RAGGED, groups=5),
    "head dimension 64": Case(RAGGED, dim=64, page_size=16, groups=4),
    "head dimension 80": Case(RAGGED, dim=80, splits=2),
    "head dimension 96": Case(RAGGED, dim=96, dtype=torch.float16),
    "head dimension 128": Case(RAGGED, dim=128, page_size=32),
    "head dimension 256": Case(RAGGED, dim=256, kv_heads=1),
    "head dimension 6": Case(RAGGED, dim=6),
}


def layer_of(
    case: Case, device: torch.device = CPU
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedStep, AttentionOptions]:
    """Make queries, keys, values, step and options; everything outside the sequences' pages is NaN."""
    torch.manual_seed(0)
    pages_of = [-(-context // case.page_size) for _, context in case.sequences]
    pages = random.Random(1).sample(range(sum(pages_of) + 3), sum(pages_of) + 3)
    segments: list[Segment] = []
    positions: list[int] = []
    for (rows, context), count in zip(case.sequences, pages_of, strict=True):
        own, pages = pages[:count], pages[count:]
        runs = [range(page * case.page_size, (page + 1) * case.page_size) for page in own]
        segments.append(Segment(rows, context, runs))
        positions += range(context - rows, context)
    slots = (sum(pages_of) + 3) * case.page_size
    pool = PagedKVPool({0: (case.kv_heads, case.dim)}, slots, case.page_size, case.dtype, device)
    keys, values = (tensor.fill_(float("nan")) for tensor in pool._layers[0])
    for segment in segments:
        written = torch.tensor([slot for part in segment.runs for slot in part][: segment.context]).to(device)
        for tensor in (keys, values):
            tensor.flatten(0, 1)[written] = torch.randn(len(written), *tensor.shape[2:], dtype=case.dtype).to(device)
    batch = pool.stage([0] * len(positions), positions, [], segments).batch
    assert isinstance(batch, PagedBatch)
    heads = case.kv_heads * case.groups
    query = torch.randn(heads, len(positions), case.dim, dtype=case.dtype).transpose(0, 1).to(device)
    sinks = torch.randn(heads, dtype=case.dtype).to(device) if case.sinks else None
    return query, keys, values, batch.step, AttentionOptions(case.dim**-0.5, case.window, case.softcap, sinks)
