"""Operations that run cuDNN's kernels for batch norm and recurrent layers, in a form that a graph can hold: they change nothing
in place, and say how many bytes cuDNN keeps for their backward.

*Not yet measured*: their traces are compared with what eager dispatches on fake CUDA tensors
(tests/torch_private/test_cuda_dispatch.py)."""
