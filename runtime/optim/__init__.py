"""Optimizer updates by one written formula: C, torch's operations, and Triton, with the same bits."""
