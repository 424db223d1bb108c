"""Vectors and scores instead of text."""
