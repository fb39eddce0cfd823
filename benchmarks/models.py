"""Writes models to measure: the config of a published shape, and a tokenizer of made-up words."""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanoengine.apps.workloads import SHAPES


def write_shape(shape: str, directory: str | Path, **changes: Any) -> None:
    """Write the config.json of a shape, with these values changed."""
    Path(directory, "config.json").write_text(json.dumps(SHAPES[shape] | changes))


def write_tokenizer(vocab_size: int, directory: str | Path) -> int:
    """Write a tokenizer of all bytes, made-up words and an end token, and return the end token's id.

    It encodes a text as its bytes, and decodes the words too, half of which begin with a space.
    """
    rng, words = random.Random(0), dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(words) < vocab_size - 1:
        letters = rng.choices("etaoinshrdlucmfwypvbgk0123456789_.,:{}\"'", k=rng.randrange(1, 9))
        words["".join([rng.choice(("", "Ġ")), *letters])] = None
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    wrap: Any = PreTrainedTokenizerFast
    wrap(tokenizer_object=backend, eos_token="<eos>").save_pretrained(directory)
    return vocab_size - 1
