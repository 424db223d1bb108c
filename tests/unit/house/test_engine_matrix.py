"""The table of docs/ENGINES.md is what the wire formats declare."""

from tests.conformance.matrix import DOCUMENT, columns, split, table


def test_the_matrix_of_engines_is_up_to_date() -> None:
    _, inside, _ = split(DOCUMENT.read_text())
    assert inside == table(columns()), "run: python -m tests.conformance.matrix"
