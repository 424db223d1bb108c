"""Fuzzing by coverage of what reads bytes of others: ``make fuzz``.

A target is a module here with three names, and imports no atheris:

    run(payload)    reads the payload as the product does. It raises nothing where only documented errors come out, and
                    what is accepted encodes again to an equal message. Anything that it raises is a finding.
    SEEDS           real messages, from which a run begins
    FORM            what a payload is, for mutations that keep its structure (``mutations``)

``corpus/<target>/`` keeps the inputs that reach something new; ``test_corpus`` replays them. ``__main__`` runs the
targets one after the other, each in a process of its own (``under_atheris``).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from tests.fuzz.mutations import Form

TARGETS: Final = ("wire", "frames", "heartbeats", "cards", "lines", "multipart", "sse", "heads", "bodies")
CORPUS: Final = Path(__file__).parent / "corpus"


class Target(Protocol):
    """What the module of a target has."""

    run: Callable[[bytes], None]
    SEEDS: Sequence[bytes]
    FORM: Form
