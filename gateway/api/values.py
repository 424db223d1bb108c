"""The bound on the number of values in a JSON text, which is checked before it is parsed."""

from typing import Final

from gateway.errors import InvalidParameter

MAX_BODY_VALUES: Final = 65_536  # lists, objects, and fields of a body: parsing blocks all threads for 50 ms


def check_values(*texts: bytes, param: str | None = None) -> None:
    """Limit the number of lists, objects, and fields. Raises InvalidParameter for ``param``.

    The parser holds the GIL, and its time depends on their number; strings and numbers are parsed quickly.
    """
    values = sum(map(_count_values, texts))
    if values > MAX_BODY_VALUES:
        what = "body" if param is None else f"JSON in '{param}'"
        message = f"The {what} has {values} lists, objects, and fields; at most {MAX_BODY_VALUES} are allowed."
        raise InvalidParameter(message, param=param, code="too_many_values")


def _count_values(text: bytes) -> int:
    values = _marks(text)
    if values <= MAX_BODY_VALUES:
        return values  # an upper bound: some may be inside strings
    without_escapes = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return _marks(b"".join(without_escapes.split(b'"')[::2]))  # outside strings


def _marks(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b":")
