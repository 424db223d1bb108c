"""The gate on the path's cost fails loads that cost more, and loads that were not measured."""

from benchmarks.path_beside import failed_loads


def test_a_load_fails_if_costlier_in_most_pairs_or_unmeasured() -> None:
    results = {
        "idle": {"pairs": 8, "ratio": 1.3, "ratio_low": 1.05},
        "at_load": {"pairs": 8, "ratio": 1.3, "ratio_low": 1.2},
        "saturated": {"pairs": 1},
    }
    assert failed_loads(results, 1.1) == ["at_load", "saturated"]
