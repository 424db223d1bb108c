"""Engines a worker can run: the plug point."""
