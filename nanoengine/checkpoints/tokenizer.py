"""Loads tokenizers. Where a directory has a tokenizer.json, that file decides the token ids.

transformers rebuilds the tokenizers of some classes from their vocabulary, and drops the rest of the file.
Its object serves chat templates and names the special tokens; what encodes and decodes is the file's.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanoengine.checkpoints.checks import read_json
from nanoengine.signals import uninterrupted

if TYPE_CHECKING:  # at run time imported only for a GGUF file
    from nanoengine.checkpoints.gguf import GGUFFile

logger = logging.getLogger(__name__)
TOKENIZER_FILES = "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"
FLAGS = {"add_prefix_space", "add_bos_token", "add_eos_token", "do_lower_case"}
FLAGS |= {"tokenize_chinese_chars", "strip_accents"}  # what tokenizer_flags.py follows
PROBES = " a", "a", "Don't  say\n\n\t12345 é日本\U0001f642 </s> x<s>y<|endoftext|>z\u2581a "


@uninterrupted()  # any exception of the tokenizer counts, and none of a signal's handler
def load_tokenizer(path: Path, trust_remote_code: bool, gguf: "GGUFFile | None" = None) -> Any:
    """Return the tokenizer of a directory or a GGUF file, or None if there is none."""
    if path.is_file():
        from nanoengine.checkpoints.gguf import GGUFFile
        from nanoengine.checkpoints.gguf_tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(GGUFFile(path) if gguf is None else gguf)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        return None
    is_stated = (path / "tokenizer.json").is_file()
    load = partial(AutoTokenizer.from_pretrained, path, trust_remote_code=trust_remote_code)
    try:
        loaded = _load_stated(path, load) if is_stated else load()
        loaded("")  # raise errors of its settings now
        if not loaded.chat_template:
            loaded.chat_template = read_json(path / "chat_template.json", default={}).get("chat_template")
    except BaseException as error:  # a panic in Rust is no Exception: see requests.panics_as_errors
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        if not is_stated and (path / "tokenizer.model").is_file() and find_spec("sentencepiece") is None:
            hint = "pip install 'nanoengine[sentencepiece]'"
            raise ValueError(f"the tokenizer.model in {path} needs sentencepiece: {hint}") from error
        raise ValueError(f"the tokenizer in {path} cannot be used: {error}") from error
    if not loaded.is_fast:
        raise ValueError(f"the tokenizer in {path} has no fast version (tokenizer.json)")
    return loaded


def _load_stated(path: Path, load: Callable[[], Any]) -> Any:
    """Return transformers' tokenizer around the one that tokenizer.json describes."""
    backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    loaded: Any = None
    try:
        loaded = load()
    except Exception as error:  # of a class that needs more than the file, for example
        logger.warning("%s: AutoTokenizer fails (%s), tokenizer.json is used", path, error)
    if not isinstance(loaded, PreTrainedTokenizerFast):  # such as mistral-common's
        loaded = PreTrainedTokenizerFast.from_pretrained(path)
    settings = read_json(path / "tokenizer_config.json", default={})
    settings = {name: value for name, value in settings.items() if value is not None}
    _add_tokens(backend, loaded, path, settings)
    for name, token in loaded.special_tokens_map.items():
        if backend.token_to_id(token) is None:  # a default of the class
            setattr(loaded, name, None)
    if not FLAGS.isdisjoint(settings):
        from nanoengine.checkpoints.tokenizer_flags import apply_flags, set_ends

        apply_flags(backend, settings)
        set_ends(backend, loaded, settings)
    with suppress(Exception):  # a small vocabulary has no tokens for some texts
        if any(loaded(text).input_ids != backend.encode(text).ids for text in PROBES):
            message = "%s: tokenizer.json is followed, transformers' %s gives other token ids"
            logger.warning(message, path, type(loaded).__name__)
    loaded._tokenizer = backend
    return loaded


def _add_tokens(backend: Tokenizer, loaded: Any, path: Path, settings: dict[str, Any]) -> None:
    """Add tokens that only the files beside tokenizer.json have, and follow tokenizer_config.json's flags."""
    stated = {one["content"]: int(i) for i, one in (settings.get("added_tokens_decoder") or {}).items()}
    ids = read_json(path / "added_tokens.json", default={}) | stated
    named = {*_strings(settings), *_strings(read_json(path / "special_tokens_map.json", default={}))}
    named -= {loaded.pad_token, loaded.unk_token} - {*ids}  # these may be ordinary tokens of the vocabulary
    added = backend.get_added_tokens_decoder()
    for _, token in sorted(loaded.added_tokens_decoder.items()):
        own_id: Any = backend.token_to_id(token.content)
        is_same = token.content not in stated or repr(token) == repr(added.get(own_id))  # with its flags
        if (own_id in added and is_same) or token.content not in ids.keys() | named:
            continue
        if own_id is None:
            own_id = max([backend.get_vocab_size(with_added_tokens=False) - 1, *added]) + 1
        if ids.get(token.content, own_id) == own_id:
            backend.add_tokens([token])
            added[own_id] = token
        else:
            place = token.content, ids[token.content]
            logger.warning("%s: tokenizer.json has no place for the token %r at %d", path, *place)


def _strings(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    for one in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _strings(one)
