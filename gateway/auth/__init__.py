"""API keys: making them, and telling on every request whose key it is."""
