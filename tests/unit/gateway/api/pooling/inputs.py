"""Cards of pooling models, and scripts that answer inputs."""

from itertools import accumulate, pairwise
from typing import Any

from tokenizers import processors

from protocol.generation import PoolingCard
from protocol.job import PROTOCOL_VERSION, ModelCard, Vector, unpack_token_ids
from protocol.nats import objects
from tests.integration.gateway.scripted_worker import Attempt
from tests.small_tokenizer import BOS, EOS, byte_tokenizer
from tests.unit.gateway.local_gateway import MODEL

CONTEXT = 32
EMBEDDER = PoolingCard("embed", 3)
MATRYOSHKA = PoolingCard("embed", 3, is_matryoshka=True)
SCORER = PoolingCard("score", 1)


def tokenizer_json() -> bytes:
    """Return a tokenizer with one token per byte and BERT's pairs."""
    tokenizer = byte_tokenizer().from_str(byte_tokenizer().to_str())
    special = [(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", pair=f"{BOS} $A {EOS} $B:1 {EOS}:1", special_tokens=special
    )
    return tokenizer.to_str().encode()


def ids(text: str) -> list[int]:
    return byte_tokenizer().from_str(tokenizer_json().decode()).encode(text).ids


def with_card(pooling: PoolingCard | None) -> dict[str, Any]:
    """Return the options of a gateway whose model has this card."""
    name = objects.tokenizer_object_name(tokenizer_json())
    model_card = ModelCard(PROTOCOL_VERSION, MODEL, CONTEXT, name, None, pooling=pooling)
    return {"model_card": model_card, "tokenizer": tokenizer_json()}


def inputs_of(attempt: Attempt) -> list[list[int]]:
    """Return the inputs of a job."""
    pooling = attempt.job.pooling
    assert pooling is not None
    lengths = unpack_token_ids(pooling.lengths)
    return [attempt.prompt_ids[begin:end] for begin, end in pairwise(accumulate(lengths, initial=0))]


def vector_of(token_ids: list[int]) -> tuple[float, float, float]:
    return (float(len(token_ids)), float(token_ids[:2][-1]), 0.5)


async def embed(attempt: Attempt) -> None:
    """Answer all pending inputs, the last one first."""
    await attempt.accept()
    answered = {point.index for point in attempt.job.resume}
    for index, token_ids in reversed(list(enumerate(inputs_of(attempt)))):
        if index not in answered:
            await attempt.vector(index, vector_of(token_ids))
    await attempt.finish()


async def score_by_second(attempt: Attempt) -> None:
    """Score each pair as the length of its second text divided by 100."""
    await attempt.accept()
    assert attempt.job.pooling is not None
    firsts = unpack_token_ids(attempt.job.pooling.first_lengths)
    for index, token_ids in enumerate(inputs_of(attempt)):
        await attempt.vector(index, [(len(token_ids) - firsts[index] - 1) / 100])
    await attempt.finish()


def only(attempt: Attempt) -> list[int]:
    return sorted(frame.index for frame in attempt.frames if isinstance(frame, Vector))
