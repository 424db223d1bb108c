"""The results of a batch of messages: its result files, line by line, as Anthropic has them."""

from collections.abc import AsyncIterator
from typing import Final

import msgspec
from msgspec import Raw, Struct

from gateway.batches.files import Files
from gateway.batches.lines import CANCELLED, EXPIRED, LineFailure
from gateway.batches.store import Batch

PIECE_BYTES: Final = 64 * 1024  # of what is sent at a time


class _Response(Struct, frozen=True):
    status_code: int
    body: Raw


class _Stored(Struct, frozen=True):
    """A line of a result file."""

    custom_id: str
    response: _Response | None
    error: LineFailure | None


class _Succeeded(Struct, frozen=True, tag="succeeded"):
    message: Raw


class _Errored(Struct, frozen=True, tag="errored"):
    error: Raw


class _Canceled(Struct, frozen=True, tag="canceled"):
    """Its batch was cancelled first."""


class _Expired(Struct, frozen=True, tag="expired"):
    """Its batch expired first."""


class _Result(Struct, frozen=True):
    custom_id: str
    result: _Succeeded | _Errored | _Canceled | _Expired


_decode: Final = msgspec.json.Decoder(_Stored).decode
_encode: Final = msgspec.json.Encoder().encode


async def results_of(files: Files, batch: Batch) -> AsyncIterator[bytes]:
    """Iterate over whole lines of results. Raises StorageError and SQL's own errors."""
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id is None:
            continue
        rest = bytearray()
        async for chunk in files.content(file_id):
            rest += chunk
            if len(rest) >= PIECE_BYTES and b"\n" in chunk:
                whole, _, left = bytes(rest).rpartition(b"\n")
                rest = bytearray(left)
                yield _translated(whole)
        if rest:
            yield _translated(bytes(rest))


def _translated(lines: bytes) -> bytes:
    return b"".join(
        _encode(_Result(stored.custom_id, _result(stored))) + b"\n" for stored in map(_decode, lines.splitlines())
    )


def _result(stored: _Stored) -> _Succeeded | _Errored | _Canceled | _Expired:
    if stored.response is not None:
        body = stored.response.body
        return _Succeeded(body) if stored.response.status_code == 200 else _Errored(body)
    failure = stored.error
    code, message = ("", "") if failure is None else (failure.code, failure.message)
    if code == CANCELLED:
        return _Canceled()
    if code == EXPIRED:
        return _Expired()
    error = {"type": "error", "error": {"type": "authentication_error", "message": message}, "request_id": None}
    return _Errored(Raw(_encode(error)))
