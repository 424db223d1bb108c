"""Payloads at rest: sealed, stored by consent, erased."""
