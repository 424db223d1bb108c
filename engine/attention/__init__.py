"""Attention of a batch over its keys and values: with torch, with CPU kernels in C, and paged on GPUs."""
