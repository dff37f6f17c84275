"""What may go to disk, and whether a plan with something there makes sense. See ``climbs/disk.py`` for how it gets there."""
