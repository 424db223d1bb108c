"""Formats of tool calls and reasoning: parsing them from answers, and enforcing them by a grammar."""
