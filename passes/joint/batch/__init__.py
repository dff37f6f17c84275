"""Follows the batch through the captured graph of a micro-batch: what is of each row, and what is made of several."""
