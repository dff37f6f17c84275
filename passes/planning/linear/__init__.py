"""The planning problem as a linear program: the bound that certifies a plan, and plans to start from."""
