"""Webhooks: signed deliveries of a team's events to its endpoints, with retries, by the Standard Webhooks scheme."""
