"""Limits of a request, checked before it costs anything."""
