"""What all request bodies of the public API have in common."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from gateway.api.errors import InvalidParameter


class Body(BaseModel):
    """Base of request bodies: strict types; unknown fields are kept only to be looked through."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


def refuse_unsupported(body: Body, unsupported: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Raise InvalidParameter for a known field that cannot be honoured, unless its value means what happens anyway."""
    for field, value in (body.model_extra or {}).items():
        if field in unsupported and value is not None and value not in unsupported[field]:
            param = prefix + field
            raise InvalidParameter(f"'{param}' is not supported.", param=param, code="unsupported_parameter")
