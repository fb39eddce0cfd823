"""Programs on top of the engine: the server, the chat, the benchmark and the page that shows a run."""
