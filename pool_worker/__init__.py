"""Pulls jobs from the queue, runs an engine, and streams its tokens back."""
