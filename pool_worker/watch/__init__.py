"""Checks that this node is fast enough to stay in its pool: measured at the start, and judged while it works."""
