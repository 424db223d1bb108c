"""Payloads at rest: encrypted, stored with consent, erased."""
