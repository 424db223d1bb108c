"""Coding agents against a running Spillway, whose workers are killed while their model calls tools: ``make agents``."""
