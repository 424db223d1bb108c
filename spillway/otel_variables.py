"""OpenTelemetry's own environment variables, for what ``[telemetry]`` leaves out.

Platforms set them for every program. So what Spillway cannot use is no error: no traces are sent, and
``spillway config check`` says why.
"""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

from protocol.process import traces_installed

ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
HEADERS: Final = "OTEL_EXPORTER_OTLP_HEADERS"
PROTOCOL: Final = "OTEL_EXPORTER_OTLP_PROTOCOL"
SERVICE_NAME: Final = "OTEL_SERVICE_NAME"
RESOURCE_ATTRIBUTES: Final = "OTEL_RESOURCE_ATTRIBUTES"
DISABLED: Final = "OTEL_SDK_DISABLED"
VARIABLES: Final[Mapping[str, str]] = {  # by the key of [telemetry] that they take the place of
    "otlp_endpoint": ENDPOINT,
    "headers": HEADERS,
    "service_name": SERVICE_NAME,
    "resource_attributes": RESOURCE_ATTRIBUTES,
}
_NAME_ATTRIBUTE: Final = "service.name"


def is_disabled(env: Mapping[str, str]) -> bool:
    """Return whether traces are off, whatever the configuration says."""
    return env.get(DISABLED, "").strip().lower() == "true"


def telemetry_defaults(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of ``[telemetry]`` that the variables give."""
    attributes = _pairs(env.get(RESOURCE_ATTRIBUTES, ""))
    name = env.get(SERVICE_NAME, "").strip() or attributes.pop(_NAME_ATTRIBUTE, "")
    attributes.pop(_NAME_ATTRIBUTE, None)
    endpoint = "" if why_unusable(env) else env.get(ENDPOINT, "").strip()
    values: dict[str, Any] = {
        "otlp_endpoint": endpoint,
        "headers": _pairs(env.get(HEADERS, "")),
        "service_name": name,
        "resource_attributes": attributes,
    }
    return {key: value for key, value in values.items() if value}


def why_unusable(env: Mapping[str, str]) -> str | None:
    """Say why traces cannot go to the endpoint that the variables name; None: they can, or there is none."""
    endpoint, protocol = env.get(ENDPOINT, "").strip(), env.get(PROTOCOL, "").strip()
    if not endpoint:
        return None
    if protocol.startswith("grpc") or not endpoint.startswith(("http://", "https://")):
        return f"{ENDPOINT} is ignored: traces are sent by OTLP over HTTP, to a URL such as http://collector:4318"
    if not traces_installed():
        return f"{ENDPOINT} is ignored: traces need the extra 'otel'"
    return None


def _pairs(text: str) -> dict[str, str]:
    """Return ``a=1,b=2`` as a mapping; values are percent-encoded, and what has no name or value is left out."""
    pairs = (pair.partition("=") for pair in text.split(","))
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs if name.strip() and value.strip()}
