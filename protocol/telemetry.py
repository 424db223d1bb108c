"""Settings of trace export, shared by every process that creates spans."""

from importlib.util import find_spec
from typing import Annotated

from pydantic import Field, field_validator

from protocol.settings import HttpUrlText, Settings


class TelemetrySettings(Settings):
    """``[telemetry]``: traces to an OpenTelemetry collector, by OTLP over HTTP. Without ``otlp_endpoint``: none."""

    # As OTEL_EXPORTER_OTLP_ENDPOINT: "/v1/traces" is appended to it.
    otlp_endpoint: HttpUrlText | None = None
    headers: dict[str, str] = Field(default={}, repr=False)  # of each export, such as an API key
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0  # of requests whose callers have not decided it
    service_name: Annotated[str, Field(min_length=1)] = "spillway"  # "-gateway" and "-worker" are appended
    resource_attributes: dict[str, str] = Field(default={})
    export_timeout_s: Annotated[float, Field(gt=0, le=60)] = 5.0  # of one export; what fails is not kept
    max_queued_spans: Annotated[int, Field(ge=512, le=1_000_000)] = 8192  # that wait for export; the oldest go

    @field_validator("otlp_endpoint")
    @classmethod
    def _needs_the_extra(cls, endpoint: str | None) -> str | None:
        # The top package alone may be there: other libraries bring the API without the SDK.
        if endpoint is not None and not (_is_installed("sdk.trace") and _is_installed("exporter.otlp.proto.http")):
            raise ValueError("traces need the extra 'otel': pip install 'spillway[otel]'")
        return endpoint


def _is_installed(module: str) -> bool:
    try:
        return find_spec(f"opentelemetry.{module}") is not None
    except ModuleNotFoundError:  # of a package above it
        return False
