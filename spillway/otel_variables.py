"""OpenTelemetry's environment variables, as defaults of ``[telemetry]``.

Platforms set these variables for every program. A value that Spillway cannot use is therefore not an error: no traces
are sent, and ``spillway config check`` prints the reason.
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
VARIABLES: Final[Mapping[str, str]] = {  # by the key of [telemetry] that they set
    "otlp_endpoint": ENDPOINT,
    "headers": HEADERS,
    "service_name": SERVICE_NAME,
    "resource_attributes": RESOURCE_ATTRIBUTES,
}
_NAME_ATTRIBUTE: Final = "service.name"


def is_disabled(env: Mapping[str, str]) -> bool:
    """Return whether the variables turn traces off, regardless of the configuration."""
    return env.get(DISABLED, "").strip().lower() == "true"


def telemetry_defaults(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of ``[telemetry]`` that the variables set."""
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
    """Return the reason why the variables' endpoint cannot be used; None if it can, or if there is none."""
    endpoint, protocol = env.get(ENDPOINT, "").strip(), env.get(PROTOCOL, "").strip()
    if not endpoint:
        return None
    if protocol.startswith("grpc") or not endpoint.startswith(("http://", "https://")):
        return f"{ENDPOINT} is ignored: only OTLP over HTTP is supported. Use a URL such as http://collector:4318"
    if not traces_installed():
        return f"{ENDPOINT} is ignored: traces need the extra 'otel'"
    return None


def _pairs(text: str) -> dict[str, str]:
    """Parse ``a=1,b=2`` with percent-encoded values. Skips pairs without a name or a value."""
    pairs = (pair.partition("=") for pair in text.split(","))
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs if name.strip() and value.strip()}
