"""The judges themselves: each kind of damage is found and called by its name."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from benchmarks.http_client import Exchange
from pool_worker.engines.tokenizer_folder import TokenizerFolder
from protocol.job import Job, ResumePoint, Sampling, Tokens, pack_token_ids
from spillway.config import DEMO_MODEL_PATH
from tests.chaos.handovers import judge_handovers
from tests.chaos.ledger import LedgerRow
from tests.chaos.load import Call
from tests.chaos.load_scenarios.plan import expect
from tests.chaos.mix import Question, questions
from tests.chaos.oracle import Answer, BadAnswer, Choice, Difference, compare, read
from tests.chaos.report import Report, judge_answers, judge_gaps, judge_ledger, measure_gaps
from tests.chaos.strikes import Strike
from tests.chaos.watcher import HandoverBroken, Made, Run, Watcher

STREAMED = Question(1, "/v1/chat/completions", {"stream": True})
TEXT = "one two three four five six"
DONE = b"data: [DONE]\n\n"


def chunk(text: str, finish: str | None = None, **rest: Any) -> bytes:
    part = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [part], **rest}).encode() + b"\n\n"


def reply(*pieces: bytes, request_id: str = "req_1", first_s: float = 0.0, step_s: float = 1.0) -> Exchange:
    headers = [(b"x-request-id", request_id.encode()), (b"x-spillway-attempts", b"1")]
    arrived = [(first_s + number * step_s, piece) for number, piece in enumerate(pieces)]
    return Exchange(0.0, "whole", 200, headers, arrived, first_s + len(pieces) * step_s)


def answer(text: str, **choice: Any) -> Answer:
    return Answer([Choice(text, **{"finish_reason": "stop", **choice})], {"completion_tokens": 6})


def test_a_stream_is_put_together() -> None:
    found = read(STREAMED, reply(chunk("one"), chunk(" two"), chunk("", "stop"), DONE))
    assert found.choices[0].text == "one two"
    assert found.arrivals_s == [0.0, 1.0]


@pytest.mark.parametrize(
    "pieces",
    [
        [chunk("one"), chunk("", "stop")],
        [chunk("one"), DONE],
        [b'data: {"error": {"code": "worker_lost"}}\n\n', DONE],
        [chunk("one", "stop"), chunk(" two"), DONE],
        [chunk("one", "stop"), DONE, chunk(" two")],
    ],
    ids=["no-done", "no-finish-reason", "error-event", "goes-on-after-its-end", "goes-on-after-done"],
)
def test_an_incomplete_stream_is_no_answer(pieces: list[bytes]) -> None:
    with pytest.raises(BadAnswer):
        read(STREAMED, reply(*pieces))


@pytest.mark.parametrize(
    ("text", "difference"),
    [
        (TEXT, Difference()),
        ("one two three", Difference(lost=3)),
        ("one two five six", Difference(lost=2)),
        ("one two three three four five six", Difference(repeated=1)),
        ("one two three four two three four five six", Difference(repeated=3)),
        ("one two three 4 five six", Difference(changed=1)),
    ],
)
def test_damage_is_called_by_its_name(text: str, difference: Difference) -> None:
    assert compare(answer(TEXT), answer(text)) == difference


def test_reasons_counts_and_probabilities_count_too() -> None:
    whole = answer(TEXT, tokens=["a", "b"], logprobs=[-0.5, -0.25])
    assert not compare(whole, whole)
    assert compare(whole, answer(TEXT, tokens=["a"], logprobs=[-0.5])) == Difference(lost=1)
    assert compare(whole, answer(TEXT, tokens=["a", "b"], logprobs=[-0.5, -0.26])) == Difference(changed=1)
    assert not compare(whole, answer(TEXT, tokens=["a", "b"], logprobs=[-0.5, -0.2500001]), logprob_tolerance=1e-3)
    assert compare(whole, replace(whole, usage={"completion_tokens": 7})) == Difference(changed=1)
    other_end = answer(TEXT, tokens=["a", "b"], logprobs=[-0.5, -0.25], finish_reason="length")
    assert compare(whole, other_end) == Difference(changed=1)


def judged(rows: list[LedgerRow], calls: list[Call]) -> Report:
    report = Report("test", 1, 0)
    judge_ledger(report, calls, {row.request_id: row for row in rows}, tokens_of={1: 6})
    return report


def test_the_ledger_must_hold_each_request_once_and_exactly() -> None:
    call = Call(STREAMED, [reply()], answer=answer(TEXT))
    row = LedgerRow("req_1", "ok", 6, 1)
    assert judged([row], [call]).kept
    assert judged([], [call]).unrecorded == 1
    assert judged([replace(row, completion_tokens=7)], [call]).double_billed == 1
    assert judged([replace(row, completion_tokens=5)], [call]).miscounted == 1
    assert judged([row, replace(row, request_id="req_2")], [call]).double_billed == 1


def test_an_error_breaks_a_promise() -> None:
    report = Report("test", 1, 0)
    judge_answers(report, [Call(STREAMED, [reply()], error="HTTP 503")], {}, exact_logprobs=True)
    assert (report.errors, report.kept) == (1, False)
    assert json.loads(report.line())["errors"] == 1


def test_a_gap_ends_with_the_next_workers_first_token() -> None:
    watcher = Watcher({"req_1": [Run(0.5, "w1", 1), Run(3.2, "w2", 2)]})
    call = Call(STREAMED, [reply(*[chunk("x")] * 6)])  # tokens arrive at 0, 1, … 5
    report = Report("test", 1, 1)
    measure_gaps(report, [Strike("kill", 2.5, "w1", ["req_1"], 1)], [call], watcher)
    assert report.gaps_ms["kill"] == [pytest.approx(1500)]  # the token at 3.0 was under way when w1 died


def made(first: Sequence[int], handed_over: Sequence[int], then: Sequence[int]) -> Made:
    """Return the tokens of two attempts, of which the second resumes the first; one frame was sent twice."""
    found = Made()
    job = Job(1, "req_1", 1, "m", "fr.g", Sampling(max_tokens=9), b"")
    found.add_job(job)
    frame = Tokens("req_1", 1, 1, 0, tuple(first), "")
    found.add_frame(frame)
    found.add_frame(frame)
    resume = (ResumePoint(0, pack_token_ids(handed_over), 1),)
    found.add_job(structs.replace(job, attempt=2, resume=resume))
    found.add_frame(Tokens("req_1", 2, 1, 0, tuple(then), "", "length"))
    return found


def test_what_attempts_make_is_put_together_from_what_they_hand_over() -> None:
    assert made([5, 6, 7], [5, 6], [7, 8]).token_ids(0) == [5, 6, 7, 8]  # the third was not heard by the gateway
    with pytest.raises(HandoverBroken):
        made([5, 6, 7], [5, 6, 6], [7, 8]).token_ids(0)


@pytest.mark.parametrize(
    ("text", "tokens", "difference"),
    [
        ("abcd", 4, Difference()),
        ("abccd", 4, Difference(changed=1)),
        ("ab d", 4, Difference(changed=2)),
        ("abcd", 5, Difference(changed=1)),
    ],
    ids=["same", "repeated", "lost", "miscounted"],
)
def test_an_answer_is_the_text_of_the_tokens_that_were_made(text: str, tokens: int, difference: Difference) -> None:
    ids = TokenizerFolder(DEMO_MODEL_PATH).backend_tokenizer
    a, b, c, d = (ids.token_to_id(letter) or 0 for letter in "abcd")
    told = Answer([Choice(text, "length")], {"completion_tokens": tokens})
    report = Report("test", 1, 1)
    judge_handovers(report, [Call(STREAMED, [reply()], answer=told)], {"req_1": made([a, b], [a, b], [c, d])})
    assert report.difference == difference
    assert report.kept is not bool(difference)


def test_the_same_seed_asks_the_same_questions() -> None:
    def make(seed: int) -> list[Question]:
        return questions(seed, 30, "m", scripted=True, tokens=(30, 90))

    assert make(1) == make(1) != make(2)
    keys = {key for question in make(1) for key in question.body}
    assert {"stop", "logprobs", "n", "seed", "stream", "stream_options", "prompt", "messages"} <= keys


@pytest.mark.parametrize(("gaps_ms", "broken"), [([100.0, 151.0], 0), ([151.0, 151.0], 1), ([100.0, 100.0, 2001.0], 1)])
def test_gaps_are_held_to_their_bounds(gaps_ms: list[float], broken: int) -> None:
    report = Report("kill", 1, 2)
    report.gaps_ms["kill"] = gaps_ms
    judge_gaps(report, {"kill": {50: 150, 99: 2000}})
    assert len(report.offences) == broken


def test_a_fault_that_struck_no_stream_proves_nothing() -> None:
    report = Report("kill", 1, 2)
    judge_gaps(report, {"kill": {50: 150}})
    assert not report.kept


@pytest.mark.parametrize(("value", "kept"), [(1.0, True), (1.001, False), (None, False), (float("inf"), False)])
def test_a_figure_beyond_its_bound_or_without_a_measurement_is_a_broken_promise(
    value: float | None, kept: bool
) -> None:
    report = Report("load", 1, 0)
    expect(report, "figure", value, at_most=1.0)
    assert report.kept is kept
    assert "Infinity" not in report.line()
