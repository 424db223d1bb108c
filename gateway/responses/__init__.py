"""Responses that are kept: stored ones, and those made in the background."""
