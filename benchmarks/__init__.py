"""Benchmarks. Each prints one JSON line last. Results, including disappointing ones, are recorded in LOG.md."""
