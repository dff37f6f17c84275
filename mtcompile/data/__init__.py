"""Training data: files, records and tokens on one side, batches of a fixed size on the other."""
