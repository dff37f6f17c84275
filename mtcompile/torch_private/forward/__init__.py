"""Lets Dynamo trace, or refuse, the effects that a forward has beside its outputs."""
