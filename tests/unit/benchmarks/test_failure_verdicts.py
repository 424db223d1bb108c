"""The verdicts of the failure comparison: each kind of bad answer is distinguished from a good one."""

import json

import pytest

from benchmarks.failure_comparison import Expected, verdict
from benchmarks.http_client import Ending, Exchange
from benchmarks.scripted_answers import ScriptedAnswers
from benchmarks.stream_answer import read
from tests.chaos.load_scenarios.callers import Asked, served_tokens, tokens_of

TEXT = " water over the dam."
EXPECTED = Expected(TEXT, (7, 5))


def chunk(text: str, finish_reason: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]})


def usage(prompt_tokens: int, completion_tokens: int) -> str:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return json.dumps({"choices": [], "usage": counts})


def record(*events: str, ending: Ending = "whole", status: int = 200) -> Exchange:
    pieces = [(float(number), f"data: {event}\n\n".encode()) for number, event in enumerate(events)]
    return Exchange(0.0, ending=ending, status=status, pieces=pieces)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (record(chunk(TEXT), chunk("", "stop"), usage(7, 5), "[DONE]"), "answered"),
        (record(chunk(TEXT), chunk("", "stop"), usage(12, 5), "[DONE]"), "miscounted"),
        (record(chunk(TEXT), chunk("", "stop"), "[DONE]"), "miscounted"),
        (record(chunk(TEXT[:9]), chunk("", "stop"), usage(7, 2), "[DONE]"), "truncated"),
        (record(chunk(TEXT[:9]), "[DONE]"), "truncated"),
        (record(chunk(TEXT + " again"), chunk("", "stop"), usage(7, 6), "[DONE]"), "changed"),
        (record(chunk(TEXT[:9])), "cut"),
        (record(chunk(TEXT[:9]), ending="cut"), "cut"),
        (record(chunk(TEXT[:9]), json.dumps({"error": {"message": "lost"}}), "[DONE]"), "error event"),
        (record(ending="idle"), "timeout"),
        (record(chunk(TEXT[:9]), ending="overdue"), "timeout"),
        (record(ending="unreachable", status=0), "unreachable"),
        (record(ending="cut", status=0), "cut"),
        (record(status=429), "refused 429"),
    ],
)
def test_each_failure_has_its_verdict(seen: Exchange, expected: str) -> None:
    assert verdict(seen, EXPECTED) == expected


def test_events_may_come_in_any_pieces() -> None:
    whole = b": queued position=3\n\n" + b"".join(
        piece for _, piece in record(chunk(TEXT), chunk("", "stop"), "[DONE]").pieces
    )
    torn = Exchange(0.0, ending="whole", status=200, pieces=[(at, bytes([byte])) for at, byte in enumerate(whole)])
    answer = read(torn)
    assert (answer.text, answer.finish_reason, answer.is_done) == (TEXT, "stop", True)
    assert answer.comments[0][1] == "queued position=3"


def test_tokens_are_counted_by_tenant_and_window() -> None:
    exchange = record(chunk(" water over"), chunk(" the"), chunk(" dam."))
    asked = [Asked(tenant, "?", 5, exchange, read(exchange)) for tenant in ("a", "b", "b")]
    assert served_tokens(asked, 0.0, 2.0) == {"a": 3, "b": 6}


def test_the_expected_answer_has_the_requested_tokens() -> None:
    answers = ScriptedAnswers()
    text = answers.text("why does the river rise? [[tokens=30]]", 30)
    assert len(tokens_of(text)) == len(answers.token_ids(text)) == 30
