"""A compiled model at work: its programs, what lives between steps, and the runner that executes one phase."""
