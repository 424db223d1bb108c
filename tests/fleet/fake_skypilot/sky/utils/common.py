"""Part of the fake of SkyPilot."""

import enum


class StatusRefreshMode(enum.Enum):
    NONE = "NONE"
    AUTO = "AUTO"
    FORCE = "FORCE"
