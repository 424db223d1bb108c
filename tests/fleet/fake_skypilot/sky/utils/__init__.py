"""Part of the fake of SkyPilot."""
