"""Devices, paged attention backends, and the KV cache's memory."""
