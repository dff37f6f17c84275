"""Cuts of the joint graph into smaller operations: the loss head in chunks, linear weights in fragments, tokens in tiles."""
