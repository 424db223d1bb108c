"""Streams of tool calls from servers that imitate OpenAI's API, and the resulting calls."""

from typing import Any

import msgspec
import pytest

from pool_worker.engines.chat_formats.tool_calls import CallDelta, CallReader
from pool_worker.engines.framing import MalformedEvent
from protocol.job import Part

A, B = ("1", "a", '{"x": 1}'), ("2", "b", '{"y": "}"}')


def d(index: int | None = None, id: str | None = None, name: str | None = None, args: Any = None) -> dict[str, Any]:  # noqa: A002
    return {"index": index, "id": id, "function": {"name": name, "arguments": args}}


def read(*events: list[dict[str, Any]]) -> list[Part]:
    reader = CallReader()
    parts = [part for event in events for part in reader.read(msgspec.convert(event, list[CallDelta]))]
    return [*parts, *reader.end()]


def calls(parts: list[Part]) -> list[tuple[str, str, str]]:
    """Return each call's id, name and arguments, assembled like the gateway: arguments belong to the last call."""
    reported: list[tuple[str, str, str]] = []
    for part in parts:
        if part.kind == "call":
            reported.append((part.call_id, part.text, ""))
        else:
            call_id, name, arguments = reported[-1]
            reported[-1] = (call_id, name, arguments + part.text)
    return reported


@pytest.mark.parametrize(
    "events",
    [
        pytest.param(
            [[d(0, "1", "a", "")], [d(0, args='{"x"')], [d(0, args=": 1}")], [d(1, "2", "b", B[2])]], id="OpenAI"
        ),
        pytest.param([[d(0, "1", "a", A[2])], [d(0, "2", "b", B[2])]], id="the same index for all"),
        pytest.param([[d(0, "1", "a", A[2]), d(1, "2", "b", B[2])]], id="two in a delta"),
        pytest.param([[d(0, "1", "a", A[2]), d(0, "2", "b", B[2])]], id="two in a delta with one index"),
        pytest.param([[d(None, "1", "a", A[2])], [d(None, "2", "b", B[2])]], id="no index"),
        pytest.param(
            [[d(None, "1", "a")], [d(args='{"x": ')], [d(args="1}")], [d(None, "2", "b")], [d(args=B[2])]],
            id="no index, and arguments without an id",
        ),
        pytest.param(
            [[d(0, "1", "a", '{"x": ')], [d(0, "1", "a", "1}")], [d(1, "2", "b", '{"y"')], [d(1, "2", "b", ': "}"}')]],
            id="id and name in each delta",
        ),
        pytest.param(
            [[d(0, "1", "a", '{"x"')], [d(1, "2", "b", '{"y": ')], [d(0, args=": 1}")], [d(1, args='"}"}')]],
            id="by turns",
        ),
        pytest.param([[d(0, "1", "a", {"x": 1})], [d(1, "2", "b", {"y": "}"})]], id="arguments as an object"),
        pytest.param([[d(0, "1")], [d(0, name="a")], [d(0, args=A[2])], [d(1, "2", "b", B[2])]], id="the name later"),
        pytest.param([[d(3, "1", "a", A[2])], [d(7, "2", "b", B[2])]], id="any numbers"),
        pytest.param(
            [[d(0, "1", "a", A[2])], [d(0, args="\n")], [d(1, "2", "b", B[2])], [d(0, args=" ")]], id="blanks"
        ),
    ],
)
def test_two_calls_stay_separate(events: list[list[dict[str, Any]]]) -> None:
    reported = [(id_, name, msgspec.json.decode(arguments)) for id_, name, arguments in calls(read(*events))]
    assert reported == [(id_, name, msgspec.json.decode(arguments)) for id_, name, arguments in (A, B)]


@pytest.mark.parametrize("nothing", [None, "", " "])
def test_a_call_without_arguments_has_an_empty_object(nothing: str | None) -> None:
    reported = calls(read([d(0, "1", "a", nothing)], [d(1, "2", "b", nothing)]))
    assert [(name, msgspec.json.decode(arguments)) for _, name, arguments in reported] == [("a", {}), ("b", {})]


def test_calls_without_ids_are_distinguished_by_their_names_and_ends() -> None:
    reported = calls(read([d(0, name="a", args="{}")], [d(0, name="a", args="{}")], [d(name="b", args="{}")]))
    assert reported == [("", "a", "{}"), ("", "a", "{}"), ("", "b", "{}")]


def test_two_calls_never_share_an_id() -> None:
    assert [id_ for id_, *_ in calls(read([d(0, "1", "a", "{}")], [d(1, "1", "b", "{}")]))] == ["1", ""]


def test_the_open_call_is_streamed() -> None:
    reader = CallReader()
    assert reader.read(_deltas(d(0, "1", "a"))) == [Part("call", "a", "1")]
    assert reader.read(_deltas(d(0, args='{"x"'))) == [Part("arguments", '{"x"')]


def _deltas(*deltas: dict[str, Any]) -> list[CallDelta]:
    return msgspec.convert(deltas, list[CallDelta])


def test_truncated_arguments_stay_truncated() -> None:
    assert calls(read([d(0, "1", "a", '{"x"')])) == [("1", "a", '{"x"')]


@pytest.mark.parametrize(
    "events",
    [
        [[d(0, args="{}")]],
        [[d(0, "1", "a", "{}")], [d(1, "2", "b", "{")], [d(0, args="more")]],
        [[d(0, "1")]],
        [[d(n, str(n), "a", "{}") for n in range(200)]],
    ],
)
def test_an_invalid_call_is_the_servers_fault(events: list[list[dict[str, Any]]]) -> None:
    with pytest.raises(MalformedEvent):
        read(*events)
