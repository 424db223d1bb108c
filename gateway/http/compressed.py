"""Compressed request bodies: gzip and zstd, decoded up to bounds, so that a few bytes cannot become gigabytes."""

import io
import zlib
from typing import Final

import zstandard

from gateway.errors import BodyTooLarge, InvalidParameter, UnsupportedEncoding

ENCODINGS: Final = {"gzip": "gzip", "x-gzip": "gzip", "zstd": "zstd"}
MAX_RATIO: Final = 100  # of decoded bytes to sent ones, beyond the next
FREE_BYTES: Final = 1024 * 1024  # decoded, whatever the ratio
MAX_PARTS: Final = 64  # members or frames of one body: each costs a copy of all that comes after it
MAX_WINDOW_BYTES: Final = 8 * 1024 * 1024  # of zstd, as RFC 9659 has it for HTTP
_GZIP_WBITS: Final = 31


def encoding_of(header: bytes) -> str | None:
    """Return the coding that a content-encoding names, None for none. Raises UnsupportedEncoding."""
    name = header.decode("latin-1").strip().lower()
    if name in {"", "identity"}:
        return None
    if name not in ENCODINGS:
        raise UnsupportedEncoding(
            f"The body has the content-encoding '{name[:100]}': send it uncompressed, or as gzip or zstd."
        )
    return ENCODINGS[name]


def most_decoded_bytes(sent_bytes: int, max_bytes: int) -> int:
    """Return how many bytes so many compressed ones may become at most."""
    return min(max_bytes, max(FREE_BYTES, MAX_RATIO * sent_bytes))


def decoded(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decode a whole body. Raises BodyTooLarge, and InvalidParameter for what is not of this coding."""
    limit = most_decoded_bytes(len(body), max_bytes)
    try:
        plain = _of_gzip(body, limit) if encoding == "gzip" else _of_zstd(body, limit)
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        raise InvalidParameter(f"The body is not valid {encoding}: {error}") from error
    if len(plain) <= limit:
        return plain
    if limit == max_bytes:
        raise BodyTooLarge(f"The request body may have at most {max_bytes} bytes, also once it is decoded.")
    raise BodyTooLarge(f"The request body may become at most {MAX_RATIO} times as large by decoding it.")


def _of_gzip(body: bytes, limit: int) -> bytes:
    plain, rest = bytearray(), body
    parts = 0
    while rest:
        parts = _one_more(parts)
        decoder = zlib.decompressobj(_GZIP_WBITS)
        plain += decoder.decompress(rest, limit + 1 - len(plain))  # which makes no more than that
        if len(plain) > limit:
            break
        if not decoder.eof:
            raise EOFError("it is cut")
        rest = decoder.unused_data
    return bytes(plain)


def _of_zstd(body: bytes, limit: int) -> bytes:
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    with decompressor.stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
        begun = reader.read(limit + 1)
    if len(begun) > limit:
        return begun
    # The reader takes a cut frame for a whole one, and only it can be told how much to make: now nothing is too much.
    plain, rest = bytearray(), body
    parts = 0
    while rest:
        parts = _one_more(parts)
        decoder = decompressor.decompressobj()
        plain += decoder.decompress(rest)
        if not decoder.eof:
            raise EOFError("it is cut")
        rest = decoder.unused_data
    return bytes(plain)


def _one_more(parts: int) -> int:
    if parts == MAX_PARTS:
        raise EOFError(f"it has more than {MAX_PARTS} members or frames")
    return parts + 1
