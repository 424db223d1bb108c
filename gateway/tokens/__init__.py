"""Rendering and counting prompts exactly as the served model does, without any hub access."""
