"""The process of one target: ``python -m tests.fuzz.under_atheris TARGET FOLDER PROGRAM [options and corpora]``.

Options are libFuzzer's. PROGRAM is what it starts for a part of a merge: a file that runs this with its own name and
the options that it gets.

It does not stop at a finding: each is kept once in FOLDER, as the input and a text that says what was raised, and
known by where. A crash, a hang and memory without end stop libFuzzer, which keeps their inputs there, too.
"""

import hashlib
import importlib
import logging
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import cast

import atheris

from tests.fuzz import TARGETS, Target
from tests.fuzz.mutations import mutated

INSTRUMENTED = [
    "engine", "gateway", "jinja2", "ledger", "pool_worker", "protocol", "python_multipart",
]  # fmt: skip

PLACES = 2  # the innermost, by which a finding is known


def main() -> None:
    name, folder, program, *options = sys.argv[1:]
    if name not in TARGETS:
        sys.exit(f"no target {name!r}: {', '.join(TARGETS)}")
    logging.getLogger().addHandler(logging.NullHandler())
    with atheris.instrument_imports(include=INSTRUMENTED, enable_loader_override=False):
        target = cast("Target", importlib.import_module(f"tests.fuzz.{name}"))

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        def blindly(part: bytes) -> bytes:
            return bytes(atheris.Mutate(part, max(1, min(max_size, 2 * len(part) + 16))))

        return mutated(data, target.FORM, blindly, random.Random(seed))[:max_size]

    atheris.Setup([program, *options], _keeping(target.run, Path(folder)), custom_mutator=mutate)
    atheris.Fuzz()


def _keeping(run: Callable[[bytes], None], folder: Path) -> Callable[[bytes], None]:
    """Return the target without its exceptions, which are kept."""
    known = set[str]()

    def test_one_input(payload: bytes) -> None:
        try:
            run(payload)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is a finding
            places = traceback.extract_tb(error.__traceback__)[-PLACES:]
            place = "-".join([type(error).__name__, *(f"{Path(one.filename).stem}.{one.lineno}" for one in places)])
            if place in known:
                return
            known.add(place)
            digest = hashlib.sha256(payload).hexdigest()[:12]
            (folder / f"{place}-{digest}").write_bytes(payload)
            (folder / f"{place}-{digest}.txt").write_text(traceback.format_exc(limit=-6))

    return test_one_input


if __name__ == "__main__":
    main()
