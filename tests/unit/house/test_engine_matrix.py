"""The tables of docs/reference/engines.md are what the wire formats declare."""

from tests.conformance.matrix import DOCUMENT, PROFILES_BEGIN, PROFILES_END, columns, profiles_table, split, table


def test_the_matrix_of_engines_is_up_to_date() -> None:
    _, inside, _ = split(DOCUMENT.read_text())
    assert inside == table(columns()), "run: python -m tests.conformance.matrix"


def test_so_is_the_table_of_profiles() -> None:
    _, inside, _ = split(DOCUMENT.read_text(), PROFILES_BEGIN, PROFILES_END)
    assert inside == profiles_table(), "run: python -m tests.conformance.matrix"
