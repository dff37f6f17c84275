"""Joint graphs of models whose sources are ours are recorded, without the ordinary capture."""
