"""Proofs that a joint graph computes after a cut what it did before: one file for each kind of cut."""
