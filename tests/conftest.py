"""What every test shares."""

import pytest
import torch

# The models are tiny, and threads that share a busy core make each step wait milliseconds.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))
