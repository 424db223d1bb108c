"""The body of a message batch, split anywhere."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batches import anthropic_routes
from gateway.batches.anthropic_routes import MAX_NESTING, lines_of
from gateway.errors import BadRequest, BodyTooLarge, InvalidParameter, MalformedJson, Refused
from gateway.settings import BatchSettings

SMALL = BatchSettings(max_line_bytes=2000, max_message_batch_bytes=20_000, max_message_batch_requests=5)
PARAMS = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": 'Grüße, "1]}" \\ \u2028'}]}


def request(custom_id: str, **change: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "params": {**PARAMS, **change}}


async def in_thread(_size_bytes: int, parse: Callable[[], list[bytes]]) -> list[bytes]:
    return await asyncio.to_thread(parse)


def body_of(*requests: Any) -> bytes:
    return json.dumps({"requests": requests}, separators=(",", ":")).encode()


def read(body: bytes, *sizes: int, lines: bool = False) -> list[Any]:
    """Return the lines of a body in chunks of these sizes; the last size repeats."""

    async def chunks() -> AsyncIterator[bytes]:
        at = 0
        for number in range(len(body) + len(sizes)):
            size = sizes[min(number, len(sizes) - 1)]
            yield body[at : at + size]
            at += size

    async def all_lines() -> list[bytes]:
        return [line async for some in lines_of(chunks(), SMALL, in_thread) for line in some]

    found = asyncio.run(all_lines())
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in found)
    return found if lines else [json.loads(line) for line in found]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_chunk_boundaries_do_not_matter(sizes: list[int], is_pretty: bool, is_ascii: bool) -> None:
    wanted = [request("a"), request("b-_9", temperature=0.25), request("c", metadata={"user_id": None})]
    body = json.dumps(
        {"other": [1.5, {"requests": []}], "requests": wanted, "n": 12},
        indent=2 if is_pretty else None,
        ensure_ascii=is_ascii,
    )
    lines = read(body.encode(), *sizes)
    assert [(line["custom_id"], line["body"]) for line in lines] == [
        (one["custom_id"], one["params"]) for one in wanted
    ]
    assert {(line["method"], line["url"]) for line in lines} == {("POST", "/v1/messages")}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse each chunk as a piece."""
    monkeypatch.setattr(anthropic_routes, "PIECE_BYTES", 1)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("cut", [1, 7, 700, 1200, 1900, 10_000])
def test_a_request_can_be_as_large_as_a_line(cut: int) -> None:
    """Depending on chunk boundaries, a request of 3.5 MiB was once refused with a limit of 4 MiB."""
    around = len(read(body_of(request("a", system=""), request("b")), 10_000, lines=True)[0])
    for more, is_allowed in ((0, True), (1, False)):
        body = body_of(request("a", system="x" * (SMALL.max_line_bytes - around + more)), request("b"))
        if is_allowed:
            assert [line["custom_id"] for line in read(body, cut)] == ["a", "b"]
            continue
        with pytest.raises(InvalidParameter) as caught:
            read(body, cut)
        assert (caught.value.param, caught.value.code) == ("requests.0", "too_large")


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_pieces_can_end_anywhere(cut: int) -> None:
    wanted = [request("a", system='\\"]}\\\\ \u2028 \n', temperature=-1.5e-3), request("b", stop=[])]
    body = json.dumps({"n": 12, "deep": [[{}]], "requests": wanted, "last": 1.5}, indent=1).encode()
    assert [line["body"] for line in read(body, cut)] == [one["params"] for one in wanted]


def test_all_parsing_is_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 4 MiB once blocked all other requests for 687 ms."""
    threads: set[int] = set()
    decode = anthropic_routes._line

    def noted(raw: bytes, name: str) -> tuple[str, bytes]:
        threads.add(threading.get_ident())
        return decode(raw, name)

    monkeypatch.setattr(anthropic_routes, "_line", noted)
    assert len(read(body_of(request("a"), request("b")), 50)) == 2
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("requests", "param"),
    [
        ([request("a"), 5], "requests.1"),
        ([request("a"), request("")], "requests.1.custom_id"),
        ([request("a" * 65)], "requests.0.custom_id"),
        ([request("a b")], "requests.0.custom_id"),
        ([request("a\n")], "requests.0.custom_id"),
        ([{"params": PARAMS}], "requests.0.custom_id"),
        ([request("a"), request("b"), request("a")], "requests.2.custom_id"),
        ([{"custom_id": "a"}], "requests.0.params"),
        ([request("a", model=None)], "requests.0.params.model"),
        ([request("a", stream=True)], "requests.0.params.stream"),
        ([request("a", system="x" * 2000)], "requests.0"),
        ([request("a", system="x" * 9000)], "requests.0"),
        ([request(str(number)) for number in range(6)], "requests"),
        ([], "requests"),
        ({}, "requests"),
    ],
)
def test_errors_are_named(requests: Any, param: str) -> None:
    body = json.dumps({"requests": requests}).encode()
    for size in (7, len(body)):
        with pytest.raises(InvalidParameter) as caught:
            read(body, size)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", MalformedJson),
        (b"[]", MalformedJson),
        (b"{}", InvalidParameter),
        (b'{"requests": [', MalformedJson),
        (b'{"requests": [{"custom_id": "a", "params": {"model": "m"}}', MalformedJson),
        (b'{"requests": [{"custom_id": "a", "params": {"model": "m", "top_p": NaN}}]}', MalformedJson),
        (b'{"requests": [{"custom_id": "a", "params": {"model": "m"}}]} {', MalformedJson),
        (b'{"requests": [{"custom_id": "a", "params": {"model": "m"}}] "n": 1}', MalformedJson),
        (b'{"requests": [{"custom_id": "\xff"}]}', MalformedJson),
        (b'{"deep": ' + b"[" * 1500, MalformedJson),
        (b'{"requests": [{"params": ' + b"[" * MAX_NESTING, MalformedJson),
        (b'{"requests": [{"custom_id": "a", "params": {"model": "m", "top_p": 1e400}}]}', MalformedJson),
        (b'{"requests": [{"custom_id": "a", "params": {"model": "m", "system": "\\ud800"}}]}', MalformedJson),
        (b'{"requests": [{"custom_id": "a", "params": {"model": "m"}]}', MalformedJson),
        (b'{"requests": [1 2]}', BadRequest),
        (b'{"requests": [,]}', BadRequest),
        (b'{"requests" [', MalformedJson),
        (b"{requests: []}", MalformedJson),
        (b'{"requests": [' + b" " * 30_000, BodyTooLarge),
    ],
)
def test_invalid_json_is_refused(body: bytes, error: type[Refused]) -> None:
    with pytest.raises(error):
        read(body, 1000)


@pytest.mark.parametrize("more", [0, 1])
def test_a_request_can_be_as_deep_as_the_endpoint_allows(more: int) -> None:
    levels = MAX_NESTING - 2 + more  # nesting of the parameters
    body = json.dumps({"requests": [request("a", junk="?")]}).replace('"?"', "[" * levels + "]" * levels).encode()
    if not more:
        assert len(read(body, 100)) == 1
        return
    with pytest.raises(MalformedJson, match="nested too deeply"):
        read(body, 100)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400", "-1e400"])
def test_an_invalid_number_is_refused(number: str) -> None:
    body = json.dumps({"requests": [request("a", junk="?")]}).replace('"?"', number)
    with pytest.raises((MalformedJson, InvalidParameter)):
        read(body.encode(), 100)
