"""The CPU device: pinned threads, packed weights, and compiled kernels that PyTorch lacks."""
