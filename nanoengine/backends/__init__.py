"""Attention over paged memory, and the processors it runs on."""
