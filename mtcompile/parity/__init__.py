"""A model trained plainly and compiled, side by side: every bit compared, every step timed."""
