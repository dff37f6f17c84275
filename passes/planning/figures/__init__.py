"""The figures of a plan without its schedule: those that rewriting, lowering and simulating it would give, from a summary."""
