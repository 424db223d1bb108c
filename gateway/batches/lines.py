"""Lines of batches: order, validation, completion, and results."""

import codecs
import hashlib
import re
from array import array
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from gateway.api.values import check_values
from gateway.errors import InvalidParameter
from protocol.wire import UNDECODABLE

# --- order ------------------------------------------------------------------------------------------------------------
#
# FeederDeps order: lines with a common prefix run together, so that engines compute the prefix once.

BLOCK_CHARS: Final = 256
MAX_BLOCKS: Final = 128  # 32,768 characters; longer common prefixes count as equal
BLOCK_BYTES: Final = 6  # of the hash of a block
# Fields of a prompt, in the order of the rendered prompt.
FIELDS: Final = ("tools", "system", "instructions", "messages", "prompt", "input", "query")

_encode: Final = msgspec.json.Encoder().encode


def prompt_text(body: dict[str, Any]) -> str:
    """Return a text such that bodies with a common prompt prefix have a common text prefix."""
    return "".join(_encode(body[name]).decode() for name in FIELDS if body.get(name) is not None)


def sort_key(model: str, text: str) -> bytes:
    """Return a sort key of short block hashes. Prompts with equal first blocks are adjacent."""
    starts = range(0, min(len(text), BLOCK_CHARS * MAX_BLOCKS), BLOCK_CHARS)
    blocks = [model, *(text[start : start + BLOCK_CHARS] for start in starts)]
    return b"".join(hashlib.blake2b(block.encode(), digest_size=BLOCK_BYTES).digest() for block in blocks)


# --- lines ------------------------------------------------------------------------------------------------------------

EXPIRED: Final = "batch_expired"
CANCELLED: Final = "batch_cancelled"
REVOKED: Final = "key_revoked"


class Line(Struct, frozen=True):
    """A validated line of an input file."""

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
    """A line parsed only for its model."""

    body: _ModelOnly


decode_model: Final = msgspec.json.Decoder(LineModel).decode
decode_line: Final = msgspec.json.Decoder(Line).decode


def result_id(batch_id: str, number: int) -> str:
    """Return the id of a line's result."""
    return f"batch_req_{batch_id.removeprefix('batch_')}{number:08x}"


def response_line(batch_id: str, number: int, custom_id: str, *, status: int, request_id: str, body: bytes) -> bytes:
    """Return a line of the output file with the answer. ``body``: JSON."""
    if b"\n" in body:
        body = _encode(msgspec.json.decode(body))
    response = _Response(status, request_id, Raw(body))
    return _encode(_Result(result_id(batch_id, number), custom_id, response, None)) + b"\n"


def failure_line(batch_id: str, number: int, custom_id: str, failure: LineFailure) -> bytes:
    """Return a line of the error file with the reason."""
    return _encode(_Result(result_id(batch_id, number), custom_id, None, failure)) + b"\n"


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """Pack line numbers for SQL."""
    return array("I", numbers).tobytes()


class Done:
    """The completed lines. One byte per line: setting bits for a million lines takes a second."""

    def __init__(self) -> None:
        self._marks = bytearray()
        self.count = 0

    def __contains__(self, number: int) -> bool:
        return number < len(self._marks) and bool(self._marks[number])

    def add(self, packed: bytes) -> None:
        """Add packed line numbers. Raises ValueError for duplicates."""
        numbers, marks = array("I", packed), self._marks
        marks.extend(bytes(max(0, max(numbers, default=0) + 1 - len(marks))))
        for number in numbers:
            if marks[number]:
                raise ValueError(f"line {number} completed twice")
            marks[number] = 1
        self.count += len(numbers)


# --- validation -------------------------------------------------------------------------------------------------------
#
# Validation of the lines of an input file, before anything runs. Pure.

MAX_CUSTOM_ID_CHARS: Final = 512
MAX_DEPTH: Final = 200  # maximum nesting of lists and objects in a body
GUESSED_TOKENS: Final = 256  # assumed output tokens of a line without a limit
CHARS_PER_TOKEN: Final = 4
_MALFORMED: Final = re.compile(r"JSON is malformed: (?P<reason>.*) \(byte (?P<byte>\d+)\)")  # msgspec's message
_NO_NUMBER: Final = re.compile(rb"[-+]?(NaN|nan|Infinity|inf)\b")
_HALF: Final = "an unpaired surrogate, which is not a valid character"
_HALF_CHARACTER: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_ESCAPE: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)


class LineError(Struct, frozen=True):
    """Why a batch failed, in OpenAI's format. ``line`` counts from 1; None: the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Wrong(Exception):
    """A line is invalid."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class Request(Struct, frozen=True):
    """A valid line."""

    custom_id: str
    model: str  # configured
    body: dict[str, Any]

    @property
    def estimated_tokens(self) -> int:
        """Estimated tokens of prompt and answer."""
        limits = (self.body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
        most = next((limit for limit in limits if isinstance(limit, int)), GUESSED_TOKENS)
        return len(msgspec.json.encode(self.body)) // CHARS_PER_TOKEN + most


def check_line(text: bytes, endpoint: str, models: Mapping[str, str], *, any_model: bool = False) -> Request:
    """Validate a line. ``models``: allowed model names, with the configured model of each. Raises Wrong.

    ``any_model``: accept unknown models; their requests will fail.
    """
    line = _decoded(text)
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if line.get(name) is None:
            raise Wrong("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
        if not isinstance(line[name], kind):
            raise Wrong("invalid_type", f"'{name}' must be {'an object' if kind is dict else 'a string'}.", name)
    custom_id, body = line["custom_id"], line["body"]
    if not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise Wrong("invalid_custom_id", f"'custom_id' must have 1 to {MAX_CUSTOM_ID_CHARS} characters.", "custom_id")
    if line["method"] != "POST":
        raise Wrong("invalid_method", "'method' must be POST.", "method")
    if line["url"] != endpoint:
        raise Wrong("invalid_url", f"'url' must be the endpoint of the batch, {endpoint}.", "url")
    return Request(custom_id, _checked_model(body, models, any_model=any_model), body)


def _decoded(text: bytes) -> dict[str, Any]:
    try:
        check_values(text)
    except InvalidParameter as error:
        raise Wrong("too_many_values", str(error).replace("The body", "This line")) from error
    try:
        line = msgspec.json.decode(text)
    except UNDECODABLE as error:
        raise Wrong("invalid_json_line", f"This line is not valid JSON: {_why_no_json(text, error)}.") from error
    # Later parsers have a deeper call stack than this process.
    if is_deeper(text, line, MAX_DEPTH + 1):  # the line adds one level around the body
        raise Wrong("invalid_json_line", f"This line is nested more than {MAX_DEPTH} levels deep.")
    if not isinstance(line, dict):
        raise Wrong("invalid_json_line", "This line is not a JSON object.")
    return line


def is_wide(text: bytes) -> bool:
    """Return whether a file with this beginning is UTF-16 or UTF-32."""
    return text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in text[:4]


def _why_no_json(text: bytes, error: Exception) -> str:
    """Return column and reason of the syntax error."""
    place, reason = _fault_of(text, error)
    return reason if place is None else f"column {len(text[:place].decode(errors='replace')) + 1}: {reason}"


def _fault_of(text: bytes, error: Exception) -> tuple[int | None, str]:
    """Return the position of the error in bytes (None: unknown), and the reason."""
    try:
        text.decode()
    except UnicodeDecodeError as wrong:
        is_half = _HALF_CHARACTER.match(text, wrong.start) is not None
        return wrong.start, _HALF if is_half else f"byte 0x{text[wrong.start]:02x} is not UTF-8"
    for escape in _ESCAPE.finditer(text):
        if escape["half"] is not None:
            return escape.start(), _HALF
    found = _MALFORMED.fullmatch(str(error))
    if found is None:
        is_short = str(error) == "Input data was truncated"
        return (len(text.rstrip()), "the line ends too early") if is_short else (None, str(error))
    place = int(found["byte"]) - (found["reason"] == "trailing characters")  # the parser has already consumed it
    number = _NO_NUMBER.match(text, max(0, place - 1)) or _NO_NUMBER.match(text, place)
    return (number.start(), f"{number[0].decode()} is not a JSON number") if number else (place, found["reason"])


def is_deeper(text: bytes, value: object, levels: int) -> bool:
    """Return whether a value is nested deeper than ``levels``, by pydantic's count.

    ``text``: source of the value. Empty lists and objects do not count.
    """
    if text.count(b"[") + text.count(b"{") <= levels:
        return False
    here = [value]
    for _ in range(levels):
        here = [item for one in here for item in _items(one)]
    return any(_items(one) for one in here)


def _items(value: object) -> Collection[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _checked_model(body: Mapping[str, Any], models: Mapping[str, str], *, any_model: bool) -> str:
    name = body.get("model")
    if name is None:
        raise Wrong("missing_required_parameter", "Missing required parameter: 'body.model'.", "body.model")
    if not isinstance(name, str) or not (any_model or name in models):
        message = f"The model `{str(name)[:100]}` does not exist or you do not have access to it."
        raise Wrong("model_not_found", message, "body.model")
    if body.get("stream"):
        raise Wrong("invalid_value", "A line of a batch cannot set 'stream'.", "body.stream")
    if body.get("background"):
        raise Wrong("invalid_value", "A line of a batch cannot set 'background'.", "body.background")
    return models.get(name, name)
