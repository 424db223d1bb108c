"""Validation of an input file, line by line: what is wrong before anything runs. Pure."""

import codecs
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from gateway.api.fields import check_values
from gateway.errors import InvalidParameter
from protocol.wire import UNDECODABLE

MAX_CUSTOM_ID_CHARS: Final = 512
MAX_DEPTH: Final = 200  # of lists and objects in each other, in a line's body as in that of a request
GUESSED_TOKENS: Final = 256  # of an answer, where the line does not say how many it may have
CHARS_PER_TOKEN: Final = 4
_MALFORMED: Final = re.compile(r"JSON is malformed: (?P<reason>.*) \(byte (?P<byte>\d+)\)")  # as msgspec says it
_NO_NUMBER: Final = re.compile(rb"[-+]?(NaN|nan|Infinity|inf)\b")
_HALF: Final = "half of a surrogate pair, which is no character"
_HALF_CHARACTER: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_ESCAPE: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)


class LineError(Struct, frozen=True):
    """Why a batch failed, as OpenAI has it; ``line`` counts from 1, None: the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Wrong(Exception):
    """A line cannot be run."""

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
        """What it may cost, prompt and answer, as far as that can be seen from here."""
        limits = (self.body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
        most = next((limit for limit in limits if isinstance(limit, int)), GUESSED_TOKENS)
        return len(msgspec.json.encode(self.body)) // CHARS_PER_TOKEN + most


def check_line(text: bytes, endpoint: str, models: Mapping[str, str], *, any_model: bool = False) -> Request:
    """Check one line. ``models``: the configured model of each name that may be used. Raises Wrong.

    ``any_model``: of another model, too, whose request will say so itself.
    """
    line = _decoded(text)
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if line.get(name) is None:
            raise Wrong("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
        if not isinstance(line[name], kind):
            raise Wrong("invalid_type", f"'{name}' must be {'an object' if kind is dict else 'a string'}.", name)
    custom_id, body = line["custom_id"], line["body"]
    if not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise Wrong("invalid_custom_id", f"It must have 1 to {MAX_CUSTOM_ID_CHARS} characters.", "custom_id")
    if line["method"] != "POST":
        raise Wrong("invalid_method", "Only POST is supported.", "method")
    if line["url"] != endpoint:
        raise Wrong("invalid_url", f"The URL must be the batch's endpoint, {endpoint}.", "url")
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
    # Whoever reads the line later reads it deeper in the stack than this process does.
    if is_deeper(text, line, MAX_DEPTH + 1):  # the line is around its body
        raise Wrong("invalid_json_line", f"This line is nested more than {MAX_DEPTH} levels deep.")
    if not isinstance(line, dict):
        raise Wrong("invalid_json_line", "This line is no JSON object.")
    return line


def is_wide(text: bytes) -> bool:
    """Return whether a file that begins so is UTF-16 or UTF-32."""
    return text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in text[:4]


def _why_no_json(text: bytes, error: Exception) -> str:
    """Return column and reason, for who wrote the line."""
    place, reason = _fault_of(text, error)
    return reason if place is None else f"column {len(text[:place].decode(errors='replace')) + 1}: {reason}"


def _fault_of(text: bytes, error: Exception) -> tuple[int | None, str]:
    """Return the byte from which a line is wrong (None: unknown), and why."""
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
    place = int(found["byte"]) - (found["reason"] == "trailing characters")  # which it has read already
    number = _NO_NUMBER.match(text, max(0, place - 1)) or _NO_NUMBER.match(text, place)
    return (number.start(), f"{number[0].decode()} is no number in JSON") if number else (place, found["reason"])


def is_deeper(text: bytes, value: object, levels: int) -> bool:
    """Report whether values are nested more than so many lists and objects deep, as pydantic counts when it reads.

    ``text``: what was decoded. What is empty does not count: nothing is nested in it.
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
        raise Wrong("invalid_value", "A line of a batch cannot be streamed.", "body.stream")
    if body.get("background"):
        raise Wrong("invalid_value", "A line of a batch is in the background already.", "body.background")
    return models.get(name, name)
