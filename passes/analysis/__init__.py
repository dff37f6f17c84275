"""Pure functions of a graph: cost, memory, kernels, what is saved, and the bytes of training state."""
