"""Sampling: edits of the logits, one token per row, and log-probabilities."""
