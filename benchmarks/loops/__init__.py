"""Programs drawn from a grammar: models, hooks, loops and options, run plainly and compiled."""
