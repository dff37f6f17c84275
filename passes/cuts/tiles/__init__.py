"""Tiles of tokens: which operations work row by row, and the rewrite that runs them tile by tile."""
