"""What dashboards and reports ask of the ledger: pure functions over a connection, reading rollups, never raw rows.

Only ``log`` reads raw rows, by their indexes. See docs/LEDGER.md for the meaning of every figure.
"""
