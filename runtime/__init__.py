"""Schedules, their proof and their execution; installed as ``mtcompile.runtime``."""
