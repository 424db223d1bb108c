"""Tokenization of prompts exactly as the served model does it, without a model hub; parsing of tool calls."""
