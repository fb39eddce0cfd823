"""Structured outputs: text that fits a JSON schema, a regular expression, a choice or a grammar."""
