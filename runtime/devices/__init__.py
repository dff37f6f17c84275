"""Devices: the protocol they share, the emulated device, CUDA, arenas and pinned memory."""
