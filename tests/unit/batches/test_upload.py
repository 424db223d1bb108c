"""Reading the form of an upload: what is wrong is the client's error."""

from collections.abc import AsyncIterator

import pytest

from batches.upload import receive_upload
from web.errors import InvalidParameter


class Nowhere:
    async def write(self, data: bytes) -> None:
        """Forget it."""


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
async def test_a_form_that_cannot_be_read_is_refused(content_type: str, body: bytes) -> None:
    with pytest.raises(InvalidParameter):
        await receive_upload(chunks(body), content_type, Nowhere(), max_bytes=1000)
