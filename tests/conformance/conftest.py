"""Listening replays, one of each kind per module."""

from collections.abc import Iterator

import pytest

from tests.conformance.replay import ReplayOf, running_on_demand


@pytest.fixture(scope="module")
def replay_of() -> Iterator[ReplayOf]:
    with running_on_demand() as replay_of:
        yield replay_of


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a byte-level tokenizer."""
    from tests.unit.engine.tiny_models import byte_level_tokenizer  # takes seconds, and not every file needs it

    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level_tokenizer().save_pretrained(folder)
    return str(folder)
