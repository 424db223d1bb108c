"""Admission control: decides from memory, in a few microseconds, which requests may wait, in which lane, and how long.

heartbeats ──────> capacity ──┐
stream info ─────> capacity ──┼──> control ──> refusal, or a ticket with lane and queue position
tenants, gateways > lanes ────┘
"""
