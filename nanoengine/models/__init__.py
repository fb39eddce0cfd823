"""The models: our own decoder, any other one of transformers, and how their weights are loaded."""
