"""The commands: run, chat, bench."""
