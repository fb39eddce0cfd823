"""Benchmarks that compare engines: `python -m benchmarks`. Nothing is downloaded."""
