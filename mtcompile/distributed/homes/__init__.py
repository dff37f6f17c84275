"""The homes that the ranks of a host share: their memory, updates in shares, and what other hosts have parts of."""
