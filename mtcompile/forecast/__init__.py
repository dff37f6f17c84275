"""What a training step will need and take, before anything is allocated: ``mtcompile.plan``."""
