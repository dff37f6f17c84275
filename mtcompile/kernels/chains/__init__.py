"""Chains: elementwise operations of a region that one kernel does with eager's bits, and the proof that it has them."""
