"""Chats: templates turn messages into prompts, and parsers turn answers into tool calls and reasoning."""
