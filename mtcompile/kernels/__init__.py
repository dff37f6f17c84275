"""Region bodies as callables: eager or compiled by Inductor, as CUDA graphs, and the memory each needs."""
