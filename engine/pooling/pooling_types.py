"""The pooling engine's public records. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PoolingTask = Literal["embed", "score"]
PoolingKind = Literal["last", "mean", "cls"]  # which token's hidden state becomes the vector; mean: the mean of all


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """One text, or a pair of texts, from which one vector is computed."""

    index: int  # its number in the request
    token_ids: Sequence[int]
    first_tokens: int  # number of tokens of a pair's first text, which have token type 0; without a pair, of all


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """Inputs from which vectors are computed: embeddings, or scores of one component."""

    request_id: str
    task: PoolingTask
    inputs: Sequence[PoolingInput]
    dimensions: int | None = None  # number of leading components to keep, normalized again if whole vectors are


@dataclass(frozen=True, slots=True)
class PoolingInfo:
    """The loaded model of a pooling engine and its limits; constant for the engine's lifetime."""

    model: str  # hub name or path it was loaded from
    task: PoolingTask
    max_model_len: int  # tokens of one input
    dimensions: int  # of a complete vector; 1 for scores
    pooling: PoolingKind | None  # None for scores
    normalize: bool  # every vector has length 1
    is_matryoshka: bool  # leading components are a vector too
    matryoshka_dimensions: tuple[int, ...]  # allowed numbers of components; empty: any
    dtype: str
    device: str
    vocab_size: int
    parameters: int

    def takes_dimensions(self, dimensions: int) -> bool:
        """Report whether a vector's first ``dimensions`` components are a valid vector."""
        allowed = self.matryoshka_dimensions or range(1, self.dimensions + 1)
        return dimensions == self.dimensions or (self.is_matryoshka and dimensions in allowed)
