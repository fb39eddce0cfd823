"""Engines side by side: `python -m benchmarks`. Nothing is downloaded."""
