"""Writes models to measure: the config of a published shape, and a tokenizer of made-up words."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.shapes import SHAPES


def write_shape(shape: str, directory: str | Path, **changes: Any) -> None:
    """Write the config.json of a shape, with these values changed."""
    Path(directory, "config.json").write_text(json.dumps(SHAPES[shape] | changes))


def write_tokenizer(vocab_size: int, directory: str | Path) -> None:
    """Write a tokenizer of bytes and made-up words, which encodes a text as its bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"Ġw{number}" for number in range(vocab_size - len(alphabet)))]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    wrap: Any = PreTrainedTokenizerFast
    wrap(tokenizer_object=backend).save_pretrained(directory)
