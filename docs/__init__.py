"""Lessons, to be read from README.md on; `mini` and `tools` are their code."""
