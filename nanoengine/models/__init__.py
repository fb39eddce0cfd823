"""The models: the decoder, all other models on transformers' code, and the loading of their weights."""
