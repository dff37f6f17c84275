"""Weights in fragments: which linear weights can be cut along their output dimension, and the joint graph with each cut."""
