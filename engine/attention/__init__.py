"""Attention of a batch over its keys and values: on torch, on our CPU kernels, and paged on GPUs."""
