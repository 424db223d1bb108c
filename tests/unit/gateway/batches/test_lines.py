"""Completed lines."""

import pytest

from gateway.batches.lines import Done, pack_numbers


def test_lines_are_done_once() -> None:
    done = Done()
    done.add(pack_numbers([7, 1]))
    done.add(b"")
    done.add(pack_numbers([1000, 8]))
    assert [number for number in range(2000) if number in done] == [1, 7, 8, 1000]
    assert done.count == 4
    with pytest.raises(ValueError, match="line 7 completed twice"):
        done.add(pack_numbers([9, 7]))
