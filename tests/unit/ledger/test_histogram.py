"""Histograms as they are stored; the database may append one to another."""

import random

import pytest

from ledger import histogram
from ledger.histogram import Counts
from ledger.queries.distributions import decode_many


def any_counts(source: random.Random) -> Counts:
    bins = [
        histogram.ZERO,
        histogram.bin_of(1e300),
        *(histogram.bin_of(source.lognormvariate(5, 3)) for _ in range(40)),
    ]
    return {number: source.choice([1, 2, 65_535, 65_536, 200_000]) for number in bins}


@pytest.mark.parametrize("seed", range(5))
def test_counts_come_back_as_they_went_alone_and_one_behind_the_other(seed: int) -> None:
    source = random.Random(seed)
    one, other = any_counts(source), any_counts(source)
    stored, more = histogram.encode(one), histogram.encode(other)
    assert stored is not None
    assert more is not None
    assert histogram.decode(stored) == one == decode_many(stored)
    both = dict(one)
    histogram.add(both, other)
    assert histogram.decode(stored + more) == both == decode_many(stored + more)
    assert histogram.encode(dict(sorted(one.items(), reverse=True))) == stored


def test_nothing_is_null() -> None:
    assert histogram.encode({}) is None
    assert histogram.encode({3: 0}) is None
    assert histogram.decode(None) == {}
    assert histogram.extended(None, {}) is None


def test_what_is_extended_stays_short_and_nothing_is_lost() -> None:
    source = random.Random(1)
    stored, all_of_them = None, Counts()
    for _ in range(5_000):
        more = {histogram.bin_of(source.lognormvariate(5, 1)): 1}
        stored = histogram.extended(stored, more)
        histogram.add(all_of_them, more)
        assert len(stored or b"") <= histogram.LONG_BYTES
    assert histogram.decode(stored) == all_of_them


def test_taking_away_leaves_what_was_there_before() -> None:
    before = histogram.encode({1: 2, 7: 1})
    assert histogram.extended(histogram.extended(before, {1: 3, 9: 1}), {1: -3, 9: -1}) == before
    assert histogram.extended(before, {1: -2, 7: -1}) is None
