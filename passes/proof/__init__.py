"""The proof that a schedule computes the captured graph, bit for bit."""
