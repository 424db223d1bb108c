"""Queries for dashboards and reports: pure functions over a connection, which read rollups, never raw rows.

Only ``log`` reads raw rows, by their indexes. See docs/explanation/ledger.md for the meaning of every figure.
"""
