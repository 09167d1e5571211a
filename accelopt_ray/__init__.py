"""Parallel search for faster accelerator kernels."""
