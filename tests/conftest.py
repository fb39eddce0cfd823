"""One thread: the models are tiny, and threads that share a busy core make each step wait milliseconds."""

import torch

torch.set_num_threads(1)
