"""The commands in a terminal: run, chat, bench, lab."""
