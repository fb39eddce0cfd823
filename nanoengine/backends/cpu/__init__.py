"""What PyTorch leaves to its user on a CPU: threads on cores of their own, and kernels it lacks."""
