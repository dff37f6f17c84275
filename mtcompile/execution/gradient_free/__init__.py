"""Calls without gradients: the plain forward of any shape, with parameters that come to the device as they are read."""
