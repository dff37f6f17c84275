"""Analyses, planning and rewrites of a step graph, and lowering to a schedule; installed as ``mtcompile.passes``."""
