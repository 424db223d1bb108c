"""Reading a page's form."""

from typing import Final
from urllib.parse import parse_qsl

from starlette.requests import Request

from gateway.errors import InvalidParameter
from gateway.http.body import read_body

MAX_FORM_BYTES: Final = 64 * 1024
MAX_FIELDS: Final = 100
FORM_LIMIT_S: Final = 30.0


async def read_form(request: Request) -> dict[str, str]:
    """Read the fields of an ``application/x-www-form-urlencoded`` body.

    Raises InvalidParameter, and what read_body raises.
    """
    body = await read_body(request.receive, dict(request.headers.raw), MAX_FORM_BYTES, FORM_LIMIT_S)
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS))
    except ValueError as error:
        raise InvalidParameter("The form cannot be decoded.") from error
