"""Kernels of our own for CPUs, in C, compiled for the machine when a pool starts."""
