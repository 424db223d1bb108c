"""Request bodies: their base class, and the error for the first field that is wrong."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, from_json

from gateway.errors import InvalidParameter, MalformedJson

MAX_BODY_VALUES: Final = 65_536  # lists, objects and fields of one body: some 50 ms during which nothing else can run
MAX_SEARCHED_VALUES: Final = 10_000  # looked at to name the field of a number that is none: some milliseconds
MAX_NAME_CHARS: Final = 100  # of a field's name in an error
_ALTERNATIVE: Final = re.compile(r"^(str|int|float|bool|[A-Z][A-Za-z]*|[a-z-]+\[.*\])$")  # of a union, no field

_decode_json = msgspec.json.Decoder().decode
encode_json = msgspec.json.Encoder().encode


class Body(BaseModel):
    """Base of request bodies: strict types; unknown fields are kept only to be looked through."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


AnyBody = TypeVar("AnyBody", bound=Body)


class BadItem(ValueError):
    """One item of a list is wrong."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def refuse_unsupported(body: Body, unsupported: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Raise InvalidParameter for a known field that cannot be honoured, unless its value means what happens anyway."""
    refuse_fields(body.model_extra or {}, unsupported, prefix)


def refuse_fields(fields: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Raise InvalidParameter as ``refuse_unsupported`` does, for an object that no model describes."""
    for field, value in fields.items():
        if field in unsupported and value is not None and value not in unsupported[field]:
            param = prefix + field
            raise InvalidParameter(f"'{param}' is not supported.", param=param, code="unsupported_parameter")


def parse_body(kind: type[AnyBody], body: bytes) -> AnyBody:
    """Validate a body's fields, one by one. Raises MalformedJson or InvalidParameter.

    pydantic reads NaN, Infinity and 1e400, which are no JSON; msgspec, by which all else here reads bodies, does not.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _first_error(error) from error
    try:
        _decode_json(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _not_json(body, error) from error
    return request


def _not_json(body: bytes, error: Exception) -> MalformedJson | InvalidParameter:
    """Return the error of a body that pydantic alone takes for JSON; it names the field where it is soon found."""
    places: list[tuple[str, Any]] = [("", from_json(body))]
    for _ in range(MAX_SEARCHED_VALUES):
        if not places:
            break
        param, value = places.pop()
        if isinstance(value, float) and not math.isfinite(value):
            message = f"Invalid value for '{param}': NaN, Infinity and numbers beyond 1.8e308 are no JSON numbers."
            return InvalidParameter(message, param=param)
        if isinstance(value, Mapping):
            places += [(f"{param}.{name[:MAX_NAME_CHARS]}".lstrip("."), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            places += [(f"{param}.{number}", inner) for number, inner in enumerate(value[:MAX_SEARCHED_VALUES])]
    return MalformedJson(f"We could not parse the JSON body of your request: {error}")


def _nearest(errors: Sequence[ErrorDetails]) -> ErrorDetails:
    """Return the first error; of those of a union's alternatives the one that has come furthest."""
    place = errors[0]["loc"]
    before = next((number for number, part in enumerate(place) if _ALTERNATIVE.match(str(part))), None)
    if before is None:
        return errors[0]
    return max((one for one in errors if one["loc"][:before] == place[:before]), key=lambda one: len(one["loc"]))


def _first_error(error: ValidationError) -> MalformedJson | InvalidParameter:
    details = _nearest(error.errors(include_url=False, include_input=False))
    kind, message = details["type"], details["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return MalformedJson(f"We could not parse the JSON body of your request: {message}")
    param = ".".join(str(part) for part in details["loc"] if not _ALTERNATIVE.match(str(part)))
    if not param:
        return InvalidParameter("The body must be a JSON object.", code="invalid_type")
    reason = details.get("ctx", {}).get("error")
    if isinstance(reason, BadItem):
        param = f"{param}[{reason.number}]"
    if kind == "missing":
        return InvalidParameter(
            f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
        )
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return InvalidParameter(f"Invalid value for '{param}': {message}", param=param, code=code)


def check_values(*texts: bytes, param: str | None = None) -> None:
    """Refuse JSON of more lists, objects and fields than are read. Raises InvalidParameter, naming ``param``.

    A library reads them in one go, during which no other thread runs; strings and numbers are read quickly.
    """
    values = sum(map(_count_values, texts))
    if values > MAX_BODY_VALUES:
        what = "body" if param is None else f"JSON in '{param}'"
        message = f"The {what} holds {values} lists, objects and fields; at most {MAX_BODY_VALUES} are read."
        raise InvalidParameter(message, param=param, code="too_many_values")


def _count_values(text: bytes) -> int:
    values = _marks(text)
    if values <= MAX_BODY_VALUES:
        return values  # or fewer, where some are in strings
    without_escapes = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return _marks(b"".join(without_escapes.split(b'"')[::2]))  # outside of strings


def _marks(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b":")
