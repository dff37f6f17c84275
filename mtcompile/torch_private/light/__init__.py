"""Tensors without memory that note the operations on them, instead of torch's own tracing."""
