"""Checks that this node is fast enough for its pool: measures it at the start and judges it while it works."""
