"""The base of all sections of a configuration: frozen, validated, passed down."""

import ipaddress
import re
from typing import Annotated, Final
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

PORT_PLACE: Final = "{port}"  # in a server's command and URL: a port that is chosen when it starts


class Settings(BaseModel):
    """Base of all settings: immutable, and unknown keys are errors that name the key."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def in_url(host: str) -> str:
    """Return a host as URLs write it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def http_url_parts(url: str) -> SplitResult:
    """Return the parts of an absolute URL that paths can be appended to. Raises ValueError."""
    if any(character.isspace() for character in url):
        raise ValueError("holds white space")
    try:
        parts = urlsplit(url.replace(PORT_PLACE, "1"))
        port = parts.port
    except ValueError as error:
        raise ValueError(
            f"{error}; write http://host:port, and an IPv6 address in brackets: http://[::1]:8000"
        ) from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("must be an absolute URL: https://host, or http://host:port")
    if port == 0:
        raise ValueError("Port out of range 1-65535")
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise ValueError("takes no query (?…) and no fragment (#…): paths are appended to it")
    return parts


def _is_http_url(url: str) -> str:
    http_url_parts(url)
    return url


def _is_header_text(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if not (text.isascii() and text.isprintable()) or text != text.strip():
        raise ValueError("must be printable ASCII without white space at its ends")
    return value


def _is_host(host: str) -> str:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", host):
            raise ValueError('must be an address or a name alone: "127.0.0.1", "0.0.0.0", "::"') from None
    return host


PositiveInt = Annotated[int, Field(gt=0)]
HostText = Annotated[str, AfterValidator(_is_host)]  # of an address to listen at; an IPv6 one has no brackets here
HeaderSecret = Annotated[SecretStr, AfterValidator(_is_header_text)]  # an HTTP client's error would show another
HttpUrlText = Annotated[str, AfterValidator(_is_http_url)]
PositiveSeconds = Annotated[float, Field(gt=0, le=31_536_000)]  # a year: TTLs and timers take no infinity
