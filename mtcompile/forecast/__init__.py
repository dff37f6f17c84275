"""``mtcompile.plan``: the memory and time that a training step will take, before anything is allocated."""
