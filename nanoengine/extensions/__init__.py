"""Optional features of the engine, one per file. Each is imported only when a setting needs it."""
