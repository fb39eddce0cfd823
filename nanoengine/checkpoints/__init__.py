"""Reads checkpoints: config, tokenizer, tensors and quantized formats, from safetensors and GGUF files."""
