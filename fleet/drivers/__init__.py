"""Drivers: one file per kind of provider, and the registry."""
