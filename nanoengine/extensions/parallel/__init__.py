"""Tensor parallelism: several processes share a model's weights."""
