"""What uses the engine: the server, datasets, the scheduler lab, the page of a run."""
