"""Follows the flags of tokenizer_config.json, which change what tokenizer.json says."""

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

from tokenizers import Tokenizer, normalizers
from tokenizers.processors import TemplateProcessing

BERT_FLAGS = {"do_lower_case": "lowercase", "tokenize_chinese_chars": "handle_chinese_chars"}
BERT_FLAGS |= {"strip_accents": "strip_accents"}


def apply_flags(backend: Tokenizer, settings: dict[str, Any]) -> None:
    """Follow the flags that change a step of the tokenizer."""
    is_added, spelled, has_prefix = settings.get("add_prefix_space"), False, False
    for name in "normalizer", "pre_tokenizer", "decoder":
        part = getattr(backend, name)
        state = {} if part is None else json.loads(part.__getstate__())
        before = json.dumps(state)
        for step in _steps(state):
            kind = step["type"]
            spelled |= step == {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
            has_prefix |= kind in ("Metaspace", "Prepend")
            if kind == "BertNormalizer":
                step |= {BERT_FLAGS[flag]: settings[flag] for flag in BERT_FLAGS.keys() & settings.keys()}
            elif is_added is None:
                continue
            elif kind == "ByteLevel":
                step["add_prefix_space"] = is_added
            elif kind == "Metaspace" and is_added != (step["prepend_scheme"] != "never"):
                step["prepend_scheme"] = "first" if is_added else "never"
            elif kind == "Prepend" and not is_added:
                step["prepend"] = ""
            elif kind == "Strip" and name == "decoder" and not is_added:
                step["start"] = 0
        if (after := json.dumps(state)) != before:
            part.__setstate__(after.encode())
            setattr(backend, name, part)
    if is_added and spelled and not has_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), backend.normalizer])


def _steps(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a step of a tokenizer and the steps in it, as the library saves them."""
    if state:
        yield state
    for inner in chain(*(state.get(name) or () for name in ("normalizers", "pretokenizers", "decoders"))):
        yield from _steps(inner)


def set_ends(backend: Tokenizer, loaded: Any, settings: dict[str, Any]) -> None:
    """Follow add_bos_token and add_eos_token where they are given, and else the file's post-processor."""
    for end in ("bos", "eos"):
        token, is_added = getattr(loaded, f"{end}_token"), settings.get(f"add_{end}_token")
        if token is None or is_added is None:
            continue
        encoding, token_id = backend.encode(token), backend.token_to_id(token)
        inside = [i for i, part in enumerate(encoding.sequence_ids) if part is not None]
        around: list[list[Any]] = [encoding.ids[: inside[0]], encoding.ids[inside[-1] + 1 :]]
        if is_added == (token_id in around[end == "eos"]):
            continue
        own, others = [token_id] * is_added, [i for i in around[end == "eos"] if i != token_id]
        around[end == "eos"] = own + others if end == "bos" else others + own
        # A name in a template must not contain a colon, which tokens may.
        before, after = ([f"x{i}" for i in ids] for ids in around)
        used = [{"id": f"x{i}", "ids": [i], "tokens": [backend.id_to_token(i)]} for i in {*chain(*around)}]
        single, second = ([*before, f"${text}", *after] for text in "AB")
        backend.post_processor = TemplateProcessing(single=single, pair=single + second, special_tokens=used)
