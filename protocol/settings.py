"""The base of all sections of a configuration: frozen, validated, passed down."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Base of all settings: immutable, and unknown keys are errors that name the key."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


PositiveInt = Annotated[int, Field(gt=0)]
HttpUrlText = Annotated[str, Field(pattern="^https?://[^/]+")]
PositiveSeconds = Annotated[float, Field(gt=0, le=31_536_000)]  # a year: TTLs and timers take no infinity
