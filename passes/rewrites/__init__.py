"""The rewrites of the step graph that carry out a plan, one pass per file."""
