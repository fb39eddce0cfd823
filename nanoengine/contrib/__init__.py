"""Features that few users need. Nothing imports them from outside: `optional.py` loads files by name."""
