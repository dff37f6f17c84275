"""Embeddings of which a step holds only the rows that its batch names: the joint graph with these."""
