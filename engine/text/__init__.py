"""Conversion of token ids to text, and the constraints on that text."""
