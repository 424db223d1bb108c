"""Organizations, teams and API keys: their rights, their changes, and the authentication of requests."""
