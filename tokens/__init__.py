"""Prompts to token ids, exactly as the served model makes them and without any hub; calls of tools out of answers."""
