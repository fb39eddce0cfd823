"""What the engine runs without: imported only where asked for, with a seam of a few lines in the core."""
