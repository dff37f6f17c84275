"""Calls that run the plain forward: those without gradients, and training steps that fit on the device as they are."""
