"""Parsing upload forms: malformed ones are client errors."""

from collections.abc import AsyncIterator

import pytest

from gateway.batches.upload import Upload, receive_upload
from gateway.errors import InvalidParameter


class Nowhere:
    async def write(self, data: bytes) -> None:
        """Discard the data."""


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data; boundary=" + "b" * 257, b"--b--\r\n"),
        ("multipart/form-data; boundary=", b"--b--\r\n"),
        ("multipart/form-data; boundary=b", b"preamble\r\n--b--\r\n"),
        ("multipart/form-data; boundary=b", b"--b\r\n\0: x\r\n\r\n--b--\r\n"),
        ("multipart/form-data; boundary=b", b"--b\r\n" + b"a: b\r\n" * 1000 + b"\r\n--b--\r\n"),
        ("multipart/form-data; boundary=b", b""),
    ],
    ids=["long-boundary", "no-boundary", "preamble", "header", "headers", "empty"],
)
async def test_an_unreadable_form_is_refused(content_type: str, body: bytes) -> None:
    with pytest.raises(InvalidParameter):
        await receive_upload(chunks(body), content_type, Nowhere(), max_bytes=1000)


@pytest.mark.parametrize("size", [1, 5, 7, 1000])
async def test_data_before_a_form_is_refused(size: int) -> None:
    """The parser would skip it if it is in the same chunk."""
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'

    async def received(body: bytes) -> Upload:
        parts = chunks(*(body[start : start + size] for start in range(0, len(body), size)))
        return await receive_upload(parts, "multipart/form-data; boundary=b", Nowhere(), max_bytes=1000)

    assert (await received(b"\r\n\r\n" + form)).fields == {"purpose": "batch"}
    with pytest.raises(InvalidParameter, match="cannot be read"):
        await received(b"\r\nbatch\r\n" + form)
