"""A language-model trainer within a memory budget: data, loop, checkpoints."""
