"""Optimizer updates by one written formula each: in C, by torch's operations, and in Triton, with the same bits."""
