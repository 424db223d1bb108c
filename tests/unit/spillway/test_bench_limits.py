"""Limits that follow from measured loads."""

import tomllib

import pytest

from spillway.bench.limits import Memory, recommend
from spillway.bench.measure import Row

BOUND_MS = 50.0
SERVER = Memory(401_408, is_configurable=True)


def row(prompt: int, batch: int, tpot_p99_ms: float | None, tokens_per_s: float) -> Row:
    return Row(
        prompt,
        batch,
        64,
        prefill_s=1.0,
        prefill_tokens_per_s=1.0,
        decode_s=1.0,
        decode_tokens_per_s=1.0,
        ttft_p50_ms=1.0,
        ttft_p99_ms=1.0,
        tpot_p50_ms=tpot_p99_ms,
        tpot_p99_ms=tpot_p99_ms,
        itl_p99_ms=1.0,
        total_s=1.0,
        total_tokens_per_s=tokens_per_s,
        counted_prompt_tokens=prompt,
        counted_new_tokens=64,
    )


def found(*rows: Row, memory: Memory = SERVER, pool: str = "gpu"):
    return recommend(rows, BOUND_MS, pool=pool, memory=memory)


SHORT = (row(128, 1, 10, 100), row(128, 8, 20, 700), row(128, 32, 45, 1500), row(128, 64, 70, 1600))
LONG = (row(4096, 1, 12, 930), row(4096, 8, 49, 950), row(4096, 32, 120, 960))


def test_the_most_at_once_that_keep_the_bound() -> None:
    assert found(*SHORT).max_sequences == 32


def test_it_keeps_the_bound_at_every_length() -> None:
    assert found(*SHORT, *LONG).max_sequences == 8


def test_more_than_brings_throughput_is_left_in_the_queue() -> None:
    """A server of four slots: more requests only wait, and their tokens come as fast as ever."""
    slots = [row(128, batch, 20, 100 * min(batch, 4)) for batch in (1, 2, 4, 8, 16)]
    assert found(*slots).max_sequences == 4


def test_long_prompts_that_fill_the_machine_alone_do_not_starve_short_ones() -> None:
    """One long prompt at a time brings all the throughput there is; short ones need 32 at once for it."""
    within = [row(4096, batch, 30, 1000) for batch in (1, 8, 32)]
    assert found(*SHORT, *within).max_sequences == 32


def test_a_batch_that_is_fast_again_above_one_that_is_not_does_not_count() -> None:
    assert found(row(128, 1, 10, 100), row(128, 8, 60, 700), row(128, 32, 40, 1500)).max_sequences == 1


def test_nothing_is_recommended_that_breaks_the_bound_or_was_not_judged() -> None:
    slow = found(row(128, 1, 80, 100), *LONG)
    assert slow.max_sequences is None
    assert "# max_sequences: the smallest batch exceeds 50 ms at some length" in slow.as_lines()
    single_token = found(row(128, 1, None, 100))
    assert single_token.max_sequences is None
    assert "# max_sequences: no usable result" in single_token.as_lines()


@pytest.mark.parametrize(
    ("memory", "kv_tokens", "said"),
    [
        (SERVER, 401_408, "default_max_tokens"),
        (Memory(None, is_configurable=True), None, "does not report"),
        (Memory(65_536, is_configurable=False), None, "holds 65,536 tokens"),
        (Memory(None, is_configurable=True, applies=False), None, ""),
    ],
)
def test_the_lines_can_be_pasted(memory: Memory, kv_tokens: int | None, said: str) -> None:
    text = "\n".join(found(*SHORT, memory=memory, pool="gpu 1").as_lines())
    assert said in text
    expected = {"max_sequences": 32} | ({} if kv_tokens is None else {"max_kv_tokens": kv_tokens})
    assert tomllib.loads(text) == {"pools": {"gpu 1": {"engine": expected}}}
    assert len(text.splitlines()) == 4 + memory.applies


def test_what_holds_at_each_length_is_said() -> None:
    lines = found(*SHORT, *LONG).as_lines()
    assert lines[:3] == [
        "# Concurrent requests within 50 ms per token (TPOT p99):",
        "#   128 + 64 tokens: 32 (45.0 ms, 1,500 tokens/s); 64: 70.0 ms",
        "#   4,096 + 64 tokens: 8 (49.0 ms, 950 tokens/s); same tokens/s with 1; 32: 120.0 ms",
    ]


def test_programs_get_the_same() -> None:
    told = found(*SHORT, *LONG).as_json()
    assert (told["pool"], told["max_tpot_ms"], told["max_sequences"], told["max_kv_tokens"]) == ("gpu", 50, 8, 401_408)
    assert told["by_length"][1] == {"prompt_tokens": 4096, "new_tokens": 64, "holds": 8, "useful": 1, "breaks": 32}
