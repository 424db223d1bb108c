"""The report of the benchmark of the adapter for inference servers."""

from benchmarks.server_adapter import Measured, Sizes


def test_lateness_counts_from_the_first_token() -> None:
    measured = Measured()
    measured.add([[1.010, 1.031], [1.020, 1.043]], 1.0, cpu_s=0.0004, sizes=Sizes(2, 2, 0.02))
    assert measured.figures() == {
        "ttft_ms_p50": 20.0,
        "ttft_ms_p99": 20.0,
        "late_ms_p50": 3.0,
        "late_ms_p99": 3.0,
        "cpu_us_a_token": 100.0,
    }


def test_streams_of_one_token_have_no_lateness() -> None:
    measured = Measured()
    measured.add([[1.010]], 1.0, cpu_s=0.0001, sizes=Sizes(1, 1, 0.02))
    assert measured.figures() == {"ttft_ms_p50": 10.0, "ttft_ms_p99": 10.0, "cpu_us_a_token": 100.0}
