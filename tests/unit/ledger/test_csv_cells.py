"""No cell of a CSV file is a formula, whatever its key, model or pool is called."""

import csv
import io

import pytest

from ledger.csv_cells import guarded


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=1+1", "'=1+1"), ("+1", "'+1"), ("-1", "'-1"), ("@SUM(A1)", "'@SUM(A1)"), ("\t=1", "'\t'=1"),
        ("\r=1", "'\r'=1"),        (" =1", "' =1"), ("\n=1", "'\n'=1"), ("\uff1d1", "'\uff1d1"),
        ("\uff0d1", "'\uff0d1"), ("\uff0b1", "'\uff0b1"),
        ("\uff20a", "'\uff20a"), ("a;=1", "a;'=1"), ("a\n=1", "a\n'=1"), ("a\t@b", "a\t'@b"), ("a; -1", "a;' -1"),
    ],
)  # fmt: skip
def test_a_formula_is_a_text(cell: str, written: str) -> None:
    assert guarded({"a": cell, "b": 1}, ["b", "a"]) == [1, written]


@pytest.mark.parametrize("cell", ["", "alice", "a=b", "a-b", "2027-01-31", "a@b", "a, =b", "'=1", "a;b", " a"])
def test_other_text_stays(cell: str) -> None:
    assert guarded({"a": cell}, ["a"]) == [cell]


@pytest.mark.parametrize("cell", [-1, -0.5, 0, None, True])
def test_numbers_stay(cell: object) -> None:
    assert guarded({"a": cell}, ["a"]) == [cell]


def test_a_file_reads_back() -> None:
    file = io.StringIO()
    csv.writer(file).writerow(guarded({"a": '=HYPERLINK("x","y")', "b": "b"}, ["a", "b"]))
    assert file.getvalue() == '"\'=HYPERLINK(""x"",""y"")",b\r\n'
