"""CPU kernels in C, compiled for the machine when a pool starts."""
