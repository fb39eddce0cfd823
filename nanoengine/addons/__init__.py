"""What the engine runs without: imported only where it is asked for, with a seam of a few lines in the core."""
