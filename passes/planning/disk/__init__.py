"""Homes that may go to disk, and whether a plan with something there makes sense. How it gets there: ``climbs/disk.py``."""
