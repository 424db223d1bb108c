"""The figures that follow from the moments at which tokens arrive."""

import pytest

from spillway.bench.measure import Answer, Load, LoadRefused, Piece, Row, Skipped, figures, measure, percentile


def answer(*pieces: tuple[float, float]) -> Answer:
    return Answer(100, [Piece(at_s, tokens) for at_s, tokens in pieces])


def test_a_round_is_divided_where_the_last_request_gets_its_first_token() -> None:
    first = answer((0.5, 1), (1.0, 1), (2.0, 1))  # two of its tokens come in time for the prefill
    second = answer((1.0, 1), (1.5, 1), (3.0, 1))
    row = figures(Load(100, 2, 3), [[first, second]])
    assert (row.prefill_s, row.decode_s, row.total_s) == (1.0, 2.0, 3.0)
    assert row.prefill_tokens_per_s == 200
    assert row.decode_tokens_per_s == 1.5  # 3 of the 6 tokens
    assert row.total_tokens_per_s == pytest.approx(206 / 3)
    assert (row.ttft_p50_ms, row.ttft_p99_ms) == (500, 1000)
    assert (row.tpot_p50_ms, row.tpot_p99_ms) == (750, 1000)
    assert row.itl_p99_ms == 1500
    assert (row.counted_prompt_tokens, row.counted_new_tokens) == (100, 3)


def test_times_are_medians_of_the_rounds_and_percentiles_are_of_all_requests() -> None:
    rounds = [[answer((ttft_s, 1), (ttft_s + 1, 1))] for ttft_s in (1.0, 9.0, 2.0)]
    row = figures(Load(100, 1, 2), rounds)
    assert (row.prefill_s, row.decode_s, row.total_s) == (2.0, 1.0, 3.0)
    assert (row.ttft_p50_ms, row.ttft_p99_ms) == (2000, 9000)


def test_tokens_that_arrive_together_are_counted_one_by_one() -> None:
    row = figures(Load(100, 1, 5), [[answer((1.0, 1), (3.0, 4))]])
    assert row.tpot_p50_ms == 500
    assert row.decode_tokens_per_s == 2


def test_a_single_token_has_a_first_and_no_next() -> None:
    row = figures(Load(100, 1, 1), [[answer((0.25, 1))]])
    assert row.ttft_p50_ms == 250
    assert (row.decode_s, row.decode_tokens_per_s, row.tpot_p50_ms, row.itl_p99_ms) == (0, None, None, None)


@pytest.mark.parametrize(("percent", "expected"), [(50, 5), (99, 10), (100, 10), (1, 1)])
def test_percentile_is_the_nearest_rank(percent: float, expected: float) -> None:
    assert percentile(range(10, 0, -1), percent) == expected


class Scripted:
    """Notes what is asked of it and refuses long prompts."""

    def __init__(self) -> None:
        self.asked: list[tuple[Load, int]] = []

    def run(self, load: Load, seed: int) -> list[Answer]:
        self.asked.append((load, seed))
        if load.prompt_tokens > 100:
            raise LoadRefused("too long")
        return [answer((1.0, load.new_tokens))] * load.batch

    def environment(self) -> dict[str, object]:
        return {}


def test_every_load_is_warmed_up_run_and_reported_and_no_prompt_comes_twice() -> None:
    target, advances = Scripted(), []
    loads = [Load(100, 1, 8), Load(200, 1, 8), Load(100, 4, 8)]
    outcomes = list(measure(target, loads, rounds=2, advance=lambda: advances.append(1)))
    assert [type(outcome) for outcome in outcomes] == [Row, Skipped, Row]
    assert outcomes[1] == Skipped(200, 1, 8, "too long")
    assert len(advances) == 6
    warm_ups = [load for load, seed in target.asked if seed < 0]
    assert warm_ups == [Load(100, 1, 4), Load(100, 4, 4)]
    seeds = [seed for _, seed in target.asked]
    assert len(seeds) == len(set(seeds)) == 2 + 2 + 1 + 2
