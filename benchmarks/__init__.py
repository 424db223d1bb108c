"""Benchmarks: each prints one JSON line last; results, also the disappointing ones, go into LOG.md."""
