"""Endpoints of the API: what HTTP brings is called, and its answer sent."""
