"""Features for a few users. Nothing outside this folder imports it: `optional.py` finds its files by name."""
