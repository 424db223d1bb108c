"""Lines: which ones are done, and what stands in the result files."""

from array import array
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Raw, Struct

EXPIRED: Final = "batch_expired"
CANCELLED: Final = "batch_cancelled"
REVOKED: Final = "key_revoked"


class Line(Struct, frozen=True):
    """A line of an input file that has been validated."""

    custom_id: str
    body: Raw


class LineFailure(Struct, frozen=True):
    """Why a line has no response."""

    code: str
    message: str


class _Response(Struct, frozen=True):
    status_code: int
    request_id: str
    body: Raw


class _Result(Struct, frozen=True):
    id: str
    custom_id: str
    response: _Response | None
    error: LineFailure | None


class _ModelOnly(Struct, frozen=True):
    model: str


class LineModel(Struct, frozen=True):
    """A line of which only the model is wanted."""

    body: _ModelOnly


decode_model: Final = msgspec.json.Decoder(LineModel).decode
decode_line: Final = msgspec.json.Decoder(Line).decode
_encode: Final = msgspec.json.Encoder().encode


def result_id(batch_id: str, number: int) -> str:
    """Return the id of a line's result."""
    return f"batch_req_{batch_id.removeprefix('batch_')}{number:08x}"


def response_line(batch_id: str, number: int, custom_id: str, *, status: int, request_id: str, body: bytes) -> bytes:
    """A line of a result file: what was answered. ``body``: JSON."""
    if b"\n" in body:
        body = _encode(msgspec.json.decode(body))
    response = _Response(status, request_id, Raw(body))
    return _encode(_Result(result_id(batch_id, number), custom_id, response, None)) + b"\n"


def failure_line(batch_id: str, number: int, custom_id: str, failure: LineFailure) -> bytes:
    """A line of the error file: why there is no response."""
    return _encode(_Result(result_id(batch_id, number), custom_id, None, failure)) + b"\n"


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """Pack line numbers for SQL."""
    return array("I", numbers).tobytes()


class Done:
    """Which lines are done: a byte for each, as bits of a million lines take a second to set."""

    def __init__(self) -> None:
        self._marks = bytearray()
        self.count = 0

    def __contains__(self, number: int) -> bool:
        return number < len(self._marks) and bool(self._marks[number])

    def add(self, packed: bytes) -> None:
        """Add packed line numbers. Raises ValueError where one comes twice."""
        numbers, marks = array("I", packed), self._marks
        marks.extend(bytes(max(0, max(numbers, default=0) + 1 - len(marks))))
        for number in numbers:
            if marks[number]:
                raise ValueError(f"line {number} is done twice")
            marks[number] = 1
        self.count += len(numbers)
