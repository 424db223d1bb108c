"""Endpoints of the API: they receive HTTP requests, call operations, and send the answers."""
