"""Beside an inference server: owning its process, finding out what it is, and waiting until it is ready."""
