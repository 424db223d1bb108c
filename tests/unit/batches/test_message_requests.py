"""The body of a batch of messages, cut anywhere."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batches.message_requests import lines_of
from batches.settings import BatchSettings
from web.errors import ApiError, BodyTooLarge, InvalidParameter, MalformedJson

SMALL = BatchSettings(max_line_bytes=2000, max_message_batch_bytes=20_000, max_message_batch_requests=5)
PARAMS = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": 'Grüße, "1]}" \\ \u2028'}]}


def request(custom_id: str, **change: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "params": {**PARAMS, **change}}


def read(body: bytes, *sizes: int) -> list[dict[str, Any]]:
    """The lines of a body that comes in chunks of these sizes, the last of which is repeated."""

    async def chunks() -> AsyncIterator[bytes]:
        at = 0
        for number in range(len(body) + len(sizes)):
            size = sizes[min(number, len(sizes) - 1)]
            yield body[at : at + size]
            at += size

    async def lines() -> list[bytes]:
        return [line async for line in lines_of(chunks(), SMALL)]

    found = asyncio.run(lines())
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in found)
    return [json.loads(line) for line in found]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_where_it_is_cut_makes_no_difference(sizes: list[int], is_pretty: bool, is_ascii: bool) -> None:
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
        ([request("a", system="\ud800")], "requests.0.params"),
        ([request("a", system="x" * 2000)], "requests.0"),
        ([request("a", system="x" * 9000)], "requests.0"),
        ([request(str(number)) for number in range(6)], "requests"),
        ([], "requests"),
        ({}, "requests"),
    ],
)
def test_what_is_wrong_is_named(requests: Any, param: str) -> None:
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
        (b'{"requests": [' + b" " * 30_000, BodyTooLarge),
    ],
)
def test_what_is_no_json_is_refused(body: bytes, error: type[ApiError]) -> None:
    with pytest.raises(error):
        read(body, 1000)
