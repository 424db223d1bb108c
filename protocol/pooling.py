"""Jobs that want vectors instead of text: embeddings, and scores of pairs of texts."""

from msgspec import Struct


class Pooling(Struct, frozen=True, omit_defaults=True):
    """Several inputs in one job, each answered by one vector: its embedding, or the one score of a pair of texts.

    An input is numbered like a choice. One that is answered comes back as a ResumePoint with a finish reason.
    """

    task: str  # "embed" | "score"
    lengths: bytes  # tokens of each input, packed like token ids; the prompt holds the inputs one after the other
    first_lengths: bytes = b""  # likewise: how many of them are of a pair's first text (token type 0); empty: all
    dimensions: int | None = None  # keep so many leading components, normalised again where all are

    @property
    def inputs(self) -> int:
        """Number of inputs."""
        return len(self.lengths) // 4


class PoolingCard(Struct, frozen=True, omit_defaults=True):
    """The output of a model that pools: what it returns for each input instead of text."""

    task: str  # "embed" | "score"
    dimensions: int  # components of a vector
    is_matryoshka: bool = False  # trained so that the leading components of a vector are a vector too
    matryoshka_dimensions: tuple[int, ...] = ()  # how many of them; empty: any number
