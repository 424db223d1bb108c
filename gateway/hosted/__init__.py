"""Hosted pools: whether one can take a request now, and what it may cost. docs/HOSTED.md, docs/adr/0011.

Whose requests may go there: db.accounts.hosted. When they do, and come back: gateway.dispatch.overflow.
"""
