"""Request bodies: their base class, and the error for the first field that is wrong."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from web.errors import InvalidParameter, MalformedJson


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
    for field, value in (body.model_extra or {}).items():
        if field in unsupported and value is not None and value not in unsupported[field]:
            param = prefix + field
            raise InvalidParameter(f"'{param}' is not supported.", param=param, code="unsupported_parameter")


def parse_body(kind: type[AnyBody], body: bytes) -> AnyBody:
    """Validate a body's fields, one by one. Raises MalformedJson or InvalidParameter."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _first_error(error) from error


def _first_error(error: ValidationError) -> MalformedJson | InvalidParameter:
    details = error.errors(include_url=False, include_input=False)[0]
    kind, message = details["type"], details["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return MalformedJson(f"We could not parse the JSON body of your request: {message}")
    param = ".".join(str(part) for part in details["loc"])
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
