"""Kernels of our own for CPUs with AVX-512: C++ built on the machine that runs it, and its ctypes face."""
