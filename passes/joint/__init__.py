"""Rewrites and analyses of the joint graph, up to the step graph that is built of it."""
