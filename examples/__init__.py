"""Programs around the engine."""
