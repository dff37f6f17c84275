"""Zeros as inputs of kernels and operations, to measure these by."""
