"""Webhooks: events of a team, sent to its endpoints by the Standard Webhooks scheme, signed and tried again."""
