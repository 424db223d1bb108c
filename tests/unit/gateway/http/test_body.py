import asyncio
import gzip
from collections.abc import Callable
from typing import Any

import pytest
import zstandard

from gateway.api.errors import form_of
from gateway.api.values import MAX_BODY_VALUES, check_values
from gateway.errors import BodyTooLarge, ClientDisconnected, InvalidParameter, RequestTooSlow, UnsupportedEncoding
from gateway.http.asgi import Receive
from gateway.http.body import MAX_PARTS, read_body

LIMIT_S = 20.0
LENGTH_3 = {b"content-length": b"3"}


def receiving(*messages: dict[str, Any]) -> Receive:
    left = list(messages)

    async def receive() -> dict[str, Any]:
        return left.pop(0)

    return receive


def part(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_reads_all_parts() -> None:
    assert await read_body(receiving(part(b"ab"), part(b"c", more=False)), LENGTH_3, 3, LIMIT_S) == b"abc"


async def test_refuses_by_the_announced_length_without_reading() -> None:
    with pytest.raises(BodyTooLarge):
        await read_body(receiving(), {b"content-length": b"4"}, 3, LIMIT_S)


async def test_refuses_at_the_bound_and_reads_no_further() -> None:
    with pytest.raises(BodyTooLarge):
        await read_body(receiving(part(b"ab"), part(b"cd")), {}, 3, LIMIT_S)


async def test_a_client_that_disconnects() -> None:
    with pytest.raises(ClientDisconnected):
        await read_body(receiving(part(b"ab"), {"type": "http.disconnect"}), {}, 3, LIMIT_S)


async def test_a_client_that_stalls() -> None:
    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(RequestTooSlow):
        await read_body(receive, LENGTH_3, 3, 0.01)


def many(text: str) -> bytes:
    return (text * (MAX_BODY_VALUES + 1)).encode()


@pytest.mark.parametrize("body", [b"[" + many("[],") + b"0]", b"{" + many('"a":1,') + b"}", b"[" + many("{},") + b"0]"])
def test_a_body_with_too_many_values_is_refused(body: bytes) -> None:
    """4 MB of empty lists once blocked the process for a second."""
    with pytest.raises(InvalidParameter, match="are allowed") as caught:
        check_values(body)
    assert caught.value.code == "too_many_values"


def test_marks_inside_strings_do_not_count() -> None:
    check_values(b'{"prompt": "' + many("[{:") + b'\\\\", "stop": "\\"' + many("[") + b'"}')
    check_values(b'{"prompt": [' + b"1," * 10**6 + b"1]}")


def test_json_in_texts_counts_together() -> None:
    half = b"[" + b"[]," * (MAX_BODY_VALUES // 2) + b"0]"
    check_values(half, param="messages")
    with pytest.raises(InvalidParameter, match="JSON in 'messages'"):
        check_values(half, half, param="messages")


@pytest.mark.parametrize("encoding", [b"deflate", b"GZIP, deflate", b"br", b"gzip, zstd"])
async def test_an_unsupported_encoding_is_refused_before_reading(encoding: bytes) -> None:
    with pytest.raises(UnsupportedEncoding, match="uncompressed") as caught:
        await read_body(receiving(), {b"content-encoding": encoding}, 3, LIMIT_S)
    assert form_of(caught.value).status == 415
    plain = {b"content-encoding": b"identity"}
    assert await read_body(receiving(part(b"a", more=False)), plain, 3, LIMIT_S) == b"a"


CODINGS: dict[bytes, Callable[[bytes], bytes]] = {
    b"gzip": gzip.compress,
    b"x-gzip": gzip.compress,
    b"ZSTD": zstandard.compress,
}
MIB = 1024 * 1024


async def read_coded(sent: bytes, coding: bytes, max_bytes: int = 64 * MIB) -> bytes:
    half = len(sent) // 2
    messages = receiving(part(sent[:half]), part(sent[half:], more=False))
    return await read_body(messages, {b"content-encoding": coding}, max_bytes, LIMIT_S)


@pytest.mark.parametrize("coding", CODINGS)
async def test_a_compressed_body_is_decoded_within_limits(coding: bytes) -> None:
    packed = CODINGS[coding]
    assert await read_coded(packed(b'{"a": 1}'), coding) == b'{"a": 1}'
    assert await read_coded(packed(b"a") + packed(b"b"), coding) == b"ab"  # members or frames
    assert await read_coded(packed(b"x" * MIB), coding) == b"x" * MIB
    with pytest.raises(BodyTooLarge, match="at most 100 bytes"):
        await read_coded(packed(b"x" * 101), coding, 100)
    with pytest.raises(BodyTooLarge, match="100 times"):
        await read_coded(packed(b"x" * 32 * MIB), coding)
    for broken in (b"no such thing", packed(b"whole")[:-9], packed(b"whole") + packed(b"x" * 1000)[:-3]):
        with pytest.raises(InvalidParameter, match="not valid"):
            await read_coded(broken, coding)


@pytest.mark.parametrize("coding", CODINGS)
async def test_a_body_with_too_many_parts_is_refused(coding: bytes) -> None:
    """Each part copies the rest: 800 KB of empty gzip members once took seconds."""
    packed = CODINGS[coding]
    assert await read_coded(packed(b"a") * MAX_PARTS, coding) == b"a" * MAX_PARTS
    with pytest.raises(InvalidParameter, match="more than 64"):
        await read_coded(packed(b"") * 40_000, coding)
