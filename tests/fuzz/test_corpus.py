"""The kept corpus of every target, and its seeds, are read without a finding."""

import importlib
import random
from typing import cast

import pytest

from tests.fuzz import CORPUS, TARGETS, Target
from tests.fuzz.mutations import mutated

MAX_CORPUS_BYTES = 100 * 1024


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_found_in_what_is_kept(name: str) -> None:
    target = cast("Target", importlib.import_module(f"tests.fuzz.{name}"))
    kept = sorted((CORPUS / name).iterdir())
    assert kept, "make fuzz, and python -m tests.fuzz --minimise, keep one"
    for payload in [*target.SEEDS, *(path.read_bytes() for path in kept)]:
        target.run(payload)


@pytest.mark.parametrize("name", TARGETS)
def test_a_mutation_is_the_same_for_the_same_seed(name: str) -> None:
    target = cast("Target", importlib.import_module(f"tests.fuzz.{name}"))
    for number, payload in enumerate(target.SEEDS):
        first, again = (
            mutated(payload, target.FORM, lambda part: part[1:] + b"!", random.Random(number)) for _ in range(2)
        )
        assert first == again != payload


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < MAX_CORPUS_BYTES
