"""The HTTP edge: authenticates, counts, admits, publishes jobs, routes tokens back, and keeps the ledger."""
