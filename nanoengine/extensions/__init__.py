"""What the engine may use, an idea a file; each is imported only where it is asked for."""
