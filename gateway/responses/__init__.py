"""Stored and background responses."""
