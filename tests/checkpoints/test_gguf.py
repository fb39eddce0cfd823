"""GGUF files: tokenizers, compared with llama.cpp where it is installed, and files that are not sound."""

import json
import math
import multiprocessing
import pickle
import random
import re
import struct
import sys
import time
from collections import defaultdict
from contextlib import suppress
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, trainers

from nanoengine.backends.quantization import floats
from nanoengine.checkpoints.gguf import ENDS, SCALARS, GGUFFile, Header
from nanoengine.checkpoints.gguf_tokenizer import SPLITS, load_gguf_tokenizer, pre_tokenizer
from nanoengine.models.decoder import Decoder
from nanoengine.models.load import check_fit
from tests.checkpoints.test_quantized_formats import close, gguf_writer, merging_tokenizer, write_gguf
from tests.helpers import TINY, open_checkpoint

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CONTROL = ["<|bos|>", "<|eos|>", "<\uff5cUser\uff5c>", "<s>", "</s>"]
SEPARATED = (
    "the| of|Hello| WORLD|camelCase|don't|I'LL|we've| 's|1|12|123| 1234567| |  |     |\t|\n|\r\n|\n\n\n|.|..."
    "|!?| -> |/*|*/\n|($x)|a_b|#1|été|ß|привет| мир|日本語|、。|ひらがな|カタカナ|한국어|हिन्दी"
    "|ไทย|½|٣٤|🙂|€|“q”|IMGIMGABCZ|<sentinel:7>|xY|\u00a0|\u3000"
)
PIECES = SEPARATED.split("|")


def texts(count, pieces=PIECES):
    rng = random.Random(0)
    return ["".join(rng.choices(pieces, k=rng.randrange(1, 12))) for _ in range(count)]


@pytest.fixture(scope="module")
def vocabulary():
    """Return tokens and merges that were learned without splitting, so that each split changes the tokens."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    settings = {"vocab_size": 2500, "show_progress": False, "max_token_length": 12}
    trainer = trainers.BpeTrainer(initial_alphabet=ALPHABET, **settings)
    learner.train_from_iterator(texts(600), trainer)
    content = json.loads(learner.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    return tokens + CONTROL[:3], [" ".join(merge) for merge in content["merges"]]


def writer_of_one_layer(path):
    """Start a file without useful tensors."""
    sizes = {"context_length": 64, "block_count": 1, "embedding_length": 32, "feed_forward_length": 32}
    writer = gguf_writer(path, "llama", **sizes, attention__head_count=2)
    writer.add_layer_norm_rms_eps(1e-5)
    for i in range(10):
        writer.add_tensor(f"blk.0.{i}.weight", np.zeros(32, np.float32))
    return writer


def tokenizer_file(path, vocabulary, pre, kind="gpt2", **fields):
    """Write a file from which llama.cpp can read the tokenizer alone."""
    tokens, merges = vocabulary
    writer = writer_of_one_layer(path)
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    kinds = {**dict.fromkeys(CONTROL, 3), "<unk>": 2, "<td>": 4}
    writer.add_token_types([kinds.get(token, 6 if token.startswith("<0x") else 1) for token in tokens])
    if isinstance(merges, dict):
        writer.add_token_scores([merges.get(token, 0.0) for token in tokens])
    else:
        writer.add_token_merges(merges)
    if "<s>" not in tokens:  # llama.cpp's default for the kind "llama" is 1 and 2
        writer.add_bos_token_id(tokens.index("<|bos|>"))
        writer.add_eos_token_id(tokens.index("<|eos|>"))
    for name, value in fields.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    return close(writer, path)


def tokenizer_of(path, vocabulary, pre, kind="gpt2", **fields):
    return load_gguf_tokenizer(GGUFFile(tokenizer_file(path, vocabulary, pre, kind, **fields)))


TEXT = "Don't 12345 fooBar  \n\n日本"
SPLIT = {
    "gpt-2": "Don|'t| 12345| fooBar|  \n|\n|日本",
    "smollm": "Don|'t| |1|2|3|4|5| fooBar|  \n|\n|日本",
    "qwen2": "Don|'t| |1|2|3|4|5| fooBar|  \n\n|日本",
    "llama-bpe": "Don|'t| |123|45| fooBar|  \n\n|日本",
    "gpt-4o": "Don't| |123|45| foo|Bar|  \n\n|日本",
    "tekken": "Don|'t| |1|2|3|4|5| foo|Bar|  \n\n|日本",
    "superbpe": "Don't |12|345| fooBar  \n\n日本",
    "falcon": "Don|'|t| |123|45| fooBar|  \n|\n|日本",
    "deepseek-llm": "Don|'|t| |12345| fooBar|  |\n|\n|日本",
    "tiny_aya": "Don't| |12|345| foo|Bar|  \n\n|日本",
    "afmoe": "Don|'t| |12|345| fooBar|  \n\n|日本",
}


@pytest.mark.parametrize("pre", SPLIT)
def test_named_pre_tokenizer_splits_as_its_models_do(pre):
    pieces = [TEXT[slice(*place)] for _, place in pre_tokenizer(pre).pre_tokenize_str(TEXT)]
    assert "|".join(pieces) == SPLIT[pre]


@pytest.mark.parametrize("pre", ["no-such", None])
def test_unknown_pre_tokenizer_is_logged(pre, vocabulary, tmp_path, caplog):
    path = tmp_path / "model.gguf"
    assert len(tokenizer_of(path, vocabulary, pre)("12345").input_ids) > 1
    assert f"{path}: the pre-tokenizer '{pre}' is unknown" in caplog.text
    caplog.clear()
    tokenizer_of(path, vocabulary, "default")
    assert not caplog.text


def test_bos_and_eos_are_added_if_the_file_or_pre_tokenizer_says_so(vocabulary, tmp_path):
    bos, eos, user = (len(vocabulary[0]) - 3 + i for i in range(3))
    for pre, fields, added in (
        ("llama-bpe", {}, ([bos], [])),
        ("llama-bpe", {"add_bos_token": False}, ([], [])),
        ("qwen2", {}, ([], [])),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, ([bos], [eos])),
    ):
        tokenizer = tokenizer_of(tmp_path / "model.gguf", vocabulary, pre, **fields)
        ids = tokenizer("<\uff5cUser\uff5c>the<|eos|>").input_ids
        before, after = added
        assert ids[: len(before) + 1] == [*before, user]
        assert ids[-1 - len(after) :] == [eos, *after]
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (bos, eos)
        assert tokenizer.decode(ids, skip_special_tokens=True) == "the"
        assert tokenizer("the", add_special_tokens=False).input_ids == ids[len(before) + 1 : -1 - len(after)]


NORMAL, USER_DEFINED, TEXT_END = gguf.TokenType.NORMAL, gguf.TokenType.USER_DEFINED, "<|endoftext|>"
LLAMA3 = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|eot_id|> <|eom_id|>"
HARMONY = "<|startoftext|> <|endoftext|> <|return|> <|start|> <|end|> <|message|> <|call|>"
SOLAR = "<|startoftext|> <|endoftext|> <|begin|> <|end|> <|flush|> <|calls|>"
# What a header states, control tokens and user-defined tokens -> the tokens at which llama.cpp ends
TURNS = {
    "llama 3": ({"eos": "<|end_of_text|>"}, LLAMA3, "", "<|end_of_text|> <|eot_id|> <|eom_id|>"),
    "another eos": ({"eos": "<a>"}, "<a> <|end_of_text|> <|eot_id|>", "", "<a> <|end_of_text|> <|eot_id|>"),
    "chatml": ({"eos": TEXT_END}, f"{TEXT_END} <|im_start|> <|im_end|>", "", f"{TEXT_END} <|im_end|>"),
    "chatml, user-defined": ({"eos": "</s>"}, "<s> </s>", "<|im_start|> <|im_end|>", "</s> <|im_end|>"),
    "phi": ({"eos": TEXT_END}, TEXT_END, "<|user|> <|end|>", f"{TEXT_END} <|end|>"),
    "gemma": ({"eos": "<eos>"}, "<bos> <eos> <end_of_turn>", "<s> </s>", "<eos> <end_of_turn>"),
    "gemma 4": ({}, "</s> <eos> <turn|> <|tool_response>", "", "<eos> <turn|> <|tool_response>"),
    "harmony": ({"eos": "<|return|>"}, HARMONY, "", f"<|return|> {TEXT_END} <|call|>"),
    "harmony, eot": ({"eos": "<|return|>", "eot": "<|end|>"}, HARMONY, "", f"<|return|> {TEXT_END} <|call|>"),
    "solar": ({"eos": "<|flush|>"}, SOLAR, "", "<|flush|> <|endoftext|> <|calls|>"),
    "no call": ({"eos": "<|return|>"}, "<|return|> <|end|>", "", "<|return|> <|end|>"),
    "stated alone": ({"eos": "a", "eot": "b", "eom": "c"}, "<x>", "a b c", "a b c"),
    "nothing": ({}, "<x> <|im_start|>", "a", ""),
}


def write_ends(path, stated, control, user_defined="", types=None):
    tokens = ["x", "<|im_end|>x", *control.split(), *user_defined.split()]
    writer = writer_of_one_layer(path)
    writer.add_token_list(tokens)
    numbers = {**dict.fromkeys(control.split(), 3), **dict.fromkeys(user_defined.split(), USER_DEFINED)}
    if types is None:
        types = [numbers.get(token, NORMAL) for token in tokens]
    if types:
        writer.add_token_types(types)
    for name, token in stated.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", tokens.index(token))
    return [tokens[i] for i in GGUFFile(close(writer, path)).end_ids()]


@pytest.mark.parametrize("name", TURNS)
def test_a_file_ends_turns_where_llama_cpp_does(name, tmp_path):
    *given, expected = TURNS[name]
    assert write_ends(tmp_path / "model.gguf", *given) == expected.split()


@pytest.mark.parametrize("name", ENDS.split())
def test_each_name_ends_a_turn_unless_it_is_ordinary_text(name, tmp_path):
    path = tmp_path / "model.gguf"
    assert write_ends(path, {"eos": "x"}, f"<a> {name} <b>") == ["x", name]
    user_defined = ["x"] if name == "</s>" else ["x", name]
    assert write_ends(path, {"eos": "x"}, "<a>", f"{name} <b>") == user_defined
    for kind in (NORMAL, gguf.TokenType.UNUSED, gguf.TokenType.BYTE):
        assert write_ends(path, {"eos": "x"}, name, types=[NORMAL, NORMAL, kind]) == ["x"]
    assert write_ends(path, {"eos": name}, name, types=[NORMAL] * 3) == [name]
    assert write_ends(path, {}, name, types=[]) == write_ends(path, {}, name, types=[3, 3]) == []


def test_a_damaged_token_ends_no_turn_and_a_wrong_id_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    write_ends(path, {"eos": "x", "eom": "<b>"}, "<|im_end|> <b>")
    sound = path.read_bytes()
    path.write_bytes(sound.replace(b"<|im_end|>x", b"\xff<im_end|>x"))
    assert GGUFFile(path).end_ids() == [0, 3, 2]
    place = sound.index(b"eom_token_id") + len("eom_token_id")
    path.write_bytes(sound[:place] + struct.pack("<I", 6) + sound[place + 4 :])  # a float
    with pytest.raises(ValueError, match=r"model.gguf cannot be loaded: its .*eom_token_id must be an int"):
        GGUFFile(path).end_ids()


def test_a_whole_piece_is_one_token_for_some_pre_tokenizers(tmp_path):
    vocabulary = [*ALPHABET, "ab", "bc", "abc", *CONTROL[:3]], ["b c", "a b", "ab c"]
    for pre, expected in (("llama-bpe", ["abc"]), ("qwen2", ["a", "bc"])):
        assert tokenizer_of(tmp_path / "model.gguf", vocabulary, pre).tokenize("abc") == expected


# Pieces that llama.cpp splits differently from the models' own tokenizers. Its expressions know no case
# outside ASCII, no combining marks in words, no U+3000 in a range, and groups of digits take in text before.
CASES = ("ß", "привет", " мир", "हिन्दी")
LETTERS = (*CASES, "camelCase", "xY", "IMGIMGABCZ")
APPROXIMATED = {
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "tekken"), CASES),
    "granite-embed-multi-97m": CASES,
    **dict.fromkeys(("youtu", "kimi-k2"), LETTERS),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (*LETTERS, "1", "12", "123", " 1234567", "#1", "½", "٣٤")),
    **dict.fromkeys(("deepseek-coder", "deepseek-llm"), ("\u3000",)),
    "superbpe": ("٣٤",),
    "afmoe": tuple(piece for piece in PIECES if piece != piece.strip()),
}


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_tokens_equal_those_of_llama_cpp(pre, vocabulary, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = tokenizer_file(tmp_path / "model.gguf", vocabulary, pre)
    tokenizer = load_gguf_tokenizer(GGUFFile(path))
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in texts(200, [piece for piece in PIECES if piece not in APPROXIMATED.get(pre, ())]):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert theirs.tokenize(text.encode(), add_bos=False, special=True) == ids, text


# ---- SentencePiece's vocabularies ----------------------------------------------------------------


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACED = "    indented|a  b| |  |\n\n|é|日本|🙂|<s>|</s>|</s>the|</s> of|<td>|\u2581|hello world|x \n"


@pytest.fixture(scope="module")
def pieces():
    """Return tokens with visible spaces, and the score of each that was merged."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    settings = {"vocab_size": 700, "show_progress": False, "max_token_length": 9}
    trainer = trainers.BpeTrainer(initial_alphabet=["\u2581", *"the of indhlwrab"], **settings)
    learner.train_from_iterator([text.replace("日", "").replace("🙂", "") for text in texts(600)], trainer)
    learned = [token for token in sorted(learner.get_vocab(), key=learner.get_vocab().get) if token != " "]
    scores = {token: -float(i) for i, token in enumerate(learned)}
    return ["<unk>", "<s>", "</s>", *BYTES, "<td>", *learned], scores


def spm_ids(text, tokens, scores, prefix=True):
    """Return what llama.cpp's algorithm gives: the neighbors are merged whose token has the highest score."""
    found, vocab = [], {token: i for i, token in enumerate(tokens)}
    for part in re.split("(<s>|</s>|<unk>|<td>)", text):
        symbols = [*(" " * prefix + part).replace(" ", "\u2581")] * (part != "")
        if part in vocab and re.fullmatch("<.*>", part):
            symbols = [part]
        while pairs := [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]:
            i = min(pairs)[1]
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        for symbol in symbols:
            in_bytes = [f"<0x{one:02X}>" for one in symbol.encode()]
            found += [vocab[one] for one in ([symbol] if symbol in vocab else in_bytes)]
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_a_vocabulary_with_scores_gives_llama_cpp_s_ids(prefix, pieces, tmp_path):
    """Each text after a special token gets a space of its own, unless the file says that none does."""
    fields = {} if prefix else {"add_space_prefix": False}
    tokenizer = tokenizer_of(tmp_path / "model.gguf", pieces, None, "llama", **fields)
    for text in [*SPACED.split("|"), *texts(200, [*SPACED.split("|"), *PIECES])]:
        ids = spm_ids(text, *pieces, prefix)
        assert tokenizer(text).input_ids == [1, *ids], text
        assert "<" in text or tokenizer.decode(ids) == text.replace("\u2581", " ")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


@pytest.mark.slow
def test_a_vocabulary_with_scores_gives_sentencepiece_s_ids(tmp_path):
    spm = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    settings = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
    settings |= {"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True}
    settings |= {"split_digits": True, "vocab_size": 1200, "minloglevel": 2}
    sentences = iter([*texts(3000), *Path(__file__).read_text().splitlines() * 3])
    prefix = str(tmp_path / "spm")
    spm.SentencePieceTrainer.train(sentence_iterator=sentences, model_prefix=prefix, **settings)
    theirs = spm.SentencePieceProcessor(model_file=f"{prefix}.model")
    tokens = [theirs.id_to_piece(i) for i in range(len(theirs))]
    scores = {token: theirs.get_score(i) for i, token in enumerate(tokens)}
    tokenizer = tokenizer_of(tmp_path / "model.gguf", (tokens, scores), "default", "llama")
    for text in texts(2000, [piece for piece in [*SPACED.split("|"), *PIECES] if "<" not in piece]):
        assert tokenizer(text).input_ids[1:] == theirs.encode(text), text


def test_flags_for_bos_and_eos_of_a_vocabulary_with_scores_are_followed(pieces, tmp_path):
    fields = {"add_bos_token": False, "add_eos_token": True}
    tokenizer = tokenizer_of(tmp_path / "model.gguf", pieces, "default", "llama", **fields)
    assert tokenizer("</s> the").input_ids == [*spm_ids("</s> the", *pieces), 2]


@pytest.mark.parametrize("flag", [{}, {"add_bos_token": False}])
def test_gemma_4_s_vocabulary_has_merges_no_space_before_the_text_and_always_a_bos(flag, tmp_path):
    learned = ["\n", "\n\n", "\u2581", *"theofd", "th", "the", "\u2581the"]
    tokens = ["<pad>", "<|eos|>", "<|bos|>", "<unk>", *BYTES, *learned]
    merges = ["\n \n", "t h", "th e", "\u2581 the"]
    tokenizer = tokenizer_of(tmp_path / "model.gguf", (tokens, merges), "gemma4", "gemma4", **flag)
    assert tokenizer.convert_ids_to_tokens(tokenizer("the  the\n\né<|eos|>of").input_ids) == [
        *("<|bos|>", "the", "\u2581", "\u2581the", "\n\n", "<0xC3>", "<0xA9>", "<|eos|>", "o", "f")
    ]


@pytest.mark.parametrize("kind", ["t5", "bert", "rwkv", "plamo2"])
def test_other_kinds_of_vocabularies_are_refused_by_name(kind, pieces, tmp_path):
    with pytest.raises(ValueError, match=f"ggml.model '{kind}' is not one of gpt2, llama, gemma4; give"):
        tokenizer_of(tmp_path / "model.gguf", pieces, None, kind)


# ---- Files that are not sound --------------------------------------------------------------------


def string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


class Parts:
    """Holds the parts of a file. Each can be changed, and `join` returns the resulting file, valid or not."""

    def __init__(self, path):
        self.counts = {}  # what the file states, if it is not the truth
        reader = gguf.GGUFReader(path)
        self.fields = []  # name, type, bytes
        for name, field in reader.fields.items():
            if not name.startswith("GGUF."):
                self.fields.append([name, int(field.types[0]), b"".join(map(bytes, field.parts[3:]))])
        self.tensors = []  # name, dimensions, type, offset, bytes
        for tensor in reader.tensors:
            dims, offset = [int(n) for n in tensor.shape], tensor.data_offset - reader.data_offset
            self.tensors.append([tensor.name, dims, int(tensor.tensor_type), offset, bytes(tensor.data)])

    def field(self, name):
        return next(field for field in self.fields if field[0].endswith(name))

    def set(self, name, kind, value):
        """Give a field another type and value."""
        self.field(name)[1:] = kind, string(value) if kind == 8 else struct.pack(f"<{SCALARS[kind]}", value)

    def join(self):
        true = {"version": 3, "tensors": len(self.tensors), "fields": len(self.fields)}
        parts = [b"GGUF", struct.pack("<IQQ", *(self.counts.get(name, true[name]) for name in true))]
        for name, kind, data in self.fields:
            parts.append(string(name) + struct.pack("<I", kind) + data)
        for name, dims, kind, offset, _ in self.tensors:
            num_dims = self.counts.get("dims", len(dims))
            parts.append(string(name) + struct.pack(f"<I{len(dims)}QIQ", num_dims, *dims, kind, offset))
        content = b"".join(parts)
        content += bytes(-len(content) % 32)
        start = len(content)
        for *_, offset, data in sorted(self.tensors, key=lambda tensor: tensor[3]):
            if offset < 1 << 20:
                content = content[: start + offset].ljust(start + offset, b"\0") + data
        return content


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Return a small model with a tokenizer."""
    path = tmp_path_factory.mktemp("sound") / "model.gguf"
    tokenizer = merging_tokenizer()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**TINY, "head_dim": 32, "vocab_size": len(tokenizer)})
    write_gguf(path, transformers.Qwen3ForCausalLM(config), "Q8_0", "qwen3", tokenizer=tokenizer)
    assert path.read_bytes().rstrip(b"\0") == Parts(path).join().rstrip(b"\0")
    return path


def load(path):
    """Open a file and read all of its tensors, as a start does."""
    checkpoint = open_checkpoint(str(path))
    file = checkpoint.open_files()
    if checkpoint.decoder_config is not None:
        with torch.device("meta"):
            check_fit(Decoder(checkpoint.decoder_config), file.headers, path)
    return checkpoint, {x.name: floats(file.read(name), torch.float32) for name, x in file.headers.items()}


def check_right(path, checkpoint, tensors):
    """Compare what was loaded from a file with what the package gguf reads in it."""
    reader = gguf.GGUFReader(path)
    fields = {}
    for name, field in reader.fields.items():
        with suppress(UnicodeDecodeError):  # the package reads no text that is not UTF-8
            fields[name] = field.contents()
    assert {*tensors} == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        expected = torch.from_numpy(gguf.quants.dequantize(tensor.data.copy(), tensor.tensor_type))
        near = 1e-5 * float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max())
        torch.testing.assert_close(tensors[tensor.name], expected, rtol=1e-5, atol=near, equal_nan=True)
    config = checkpoint.hf_config
    assert config.num_hidden_layers == fields["qwen3.block_count"] == 2
    assert config.num_attention_heads == fields["qwen3.attention.head_count"]
    assert config.rms_norm_eps == fields["qwen3.attention.layer_norm_rms_epsilon"]
    assert config.max_position_embeddings == fields["qwen3.context_length"]
    assert config.rope_parameters["rope_theta"] == fields.get("qwen3.rope.freq_base", 10000.0)
    if checkpoint.tokenizer is not None:
        tokens = fields["tokenizer.ggml.tokens"]
        assert checkpoint.tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens


def test_a_header_is_parsed_once_until_the_file_changes(sound, tmp_path, monkeypatch):
    parsed, parse, path = [], Header.__init__, tmp_path / "model.gguf"
    monkeypatch.setattr(Header, "__init__", lambda self, data: parsed.append(data) or parse(self, data))
    path.write_bytes(sound.read_bytes())
    checkpoint, tensors = load(path)
    check_right(path, checkpoint, tensors)
    assert len(parsed) == 1
    path.write_bytes(sound.read_bytes() + bytes(32))
    checkpoint.open_files()
    assert len(parsed) == 2
    assert pickle.loads(pickle.dumps(checkpoint.gguf)).headers == checkpoint.gguf.headers


VALUES = (0, 1, 2, 3, 5, 255, 1 << 16, 10**7, (1 << 31) - 1)


def change_parts(parts, rng):
    """Make one change to the structure."""
    kind = rng.randrange(11)
    field, tensor = rng.choice(parts.fields), rng.choice(parts.tensors)
    if kind == 0:
        parts.fields.remove(field)
    elif kind == 1:
        parts.fields.insert(rng.randrange(len(parts.fields)), list(field))
    elif kind == 2:
        number = rng.choice([*SCALARS])
        layout = f"<{SCALARS[number]}"
        if number in (6, 12):
            field[1:] = number, struct.pack(layout, rng.choice((0.0, -1.0, 1e30, math.nan, math.inf)))
        else:
            data = struct.pack("<Q", rng.choice(VALUES))
            field[1:] = number, data[: struct.calcsize(layout)]
    elif kind == 3:
        field[1:] = 8, string(rng.choice(("", "qwen3", "llama", "gpt2", "yarn", "x" * 1000)))
    elif kind == 4:
        element, length = rng.choice((*SCALARS, 8, 9, 77)), rng.choice(VALUES)
        field[1:] = 9, struct.pack("<IQ", element, length) + bytes(rng.choice((0, 8, 64)))
    elif kind == 5:
        parts.counts[rng.choice(("tensors", "fields", "version", "dims"))] = rng.choice(VALUES)
    elif kind == 6:
        parts.tensors.remove(tensor)
    elif kind == 7:
        names = "", "blk.2.ffn_up.weight", "blk.x", "output.weight", "rope_freqs.weight"
        tensor[0] = rng.choice((rng.choice(parts.tensors)[0], *names))
    elif kind == 8:
        tensor[1][rng.randrange(len(tensor[1]))] = rng.choice(VALUES)
    elif kind == 9:
        tensor[2] = rng.choice([*range(42), 1 << 31])
    else:
        tensor[3] = rng.choice((*VALUES, tensor[3] + 32, 1 << 63))


def array(element, length, data=b""):
    return 9, struct.pack("<IQ", element, length) + data


def excessive_files(sound):
    """Return files that would need far more time or memory than their size, by what they have too much of."""
    merges, made = ".merges", defaultdict(partial(Parts, sound))
    fields = (
        ("elements", merges, array(0, 1 << 40)),
        ("strings", merges, array(8, 1 << 40)),
        ("arrays", merges, array(9, 1 << 30, bytes(1 << 10))),
        ("a string", merges, (8, struct.pack("<Q", 1 << 62))),
        ("layers", "block_count", (4, struct.pack("<I", 10**7))),
        ("outputs", "feed_forward_length", (4, struct.pack("<I", (1 << 24) - 32))),
        ("inputs", "embedding_length", (4, struct.pack("<I", (1 << 24) - 32))),
        ("heads", "attention.head_count", (4, struct.pack("<I", 1 << 16))),
        ("positions", "context_length", (10, struct.pack("<Q", 1 << 40))),
        ("empty merges", merges, array(8, 1 << 17, bytes(1 << 20))),
        ("repeated merges", merges, array(8, 1 << 17, string("h e") * (1 << 17))),
    )
    for (what, name, change), family in product(fields, ("qwen3", "gemma2")):
        parts = made[f"{what}, {family}"]
        parts.field(name)[1:] = change
        parts.set("general.architecture", 8, family)
        for field in parts.fields:
            field[0] = field[0].replace("qwen3", family)
    for counted in ("fields", "tensors", "dims"):
        made[counted].counts[counted] = 1 << 31
    made["offset"].tensors[0][3] = 1 << 62
    made["dimensions"].tensors[0][1] = [32, 1 << 57]
    tensors = made["overlapping tensors"].tensors
    tensors += [[f"blk.0.{i}.weight", *tensors[0][1:]] for i in range(8000)]
    made["alignment"].fields.append(["general.alignment", 10, struct.pack("<Q", 1 << 62)])
    parts = made["a token"]
    parts.set("tokenizer.ggml.model", 8, "llama")
    parts.field("tokenizer.ggml.tokens")[1:] = array(8, 1, string("x" * (1 << 20)))
    parts.fields.remove(parts.field(merges))
    return {what: parts.join() for what, parts in made.items()}


def refuse_in_little_memory(sound, paths, output):
    """Load files with 512 MB more than the process has, and write down what each said and in what time."""
    psutil.Process().rlimit(psutil.RLIMIT_AS, (psutil.Process().memory_info().vms + (512 << 20),) * 2)
    refusals = {}
    for path in [sound, *paths[:2], *paths]:  # the first ones import what they need
        start = time.process_time()
        try:
            load(path)
            error = None
        except ValueError as raised:
            error = str(raised)
        refusals[path.stem] = error, time.process_time() - start
    output.write_text(json.dumps(refusals))


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory by Linux's means")
def test_excessive_files_are_refused_quickly_in_little_memory(sound, tmp_path):
    paths = []
    for what, content in excessive_files(sound).items():
        paths.append(tmp_path / f"{what}.gguf")
        paths[-1].write_bytes(content)
    start = time.process_time()
    load(sound)
    usual = time.process_time() - start
    output = tmp_path / "refusals.json"
    arguments = sound, paths, output
    process = multiprocessing.get_context("fork").Process(target=refuse_in_little_memory, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0
    refusals = json.loads(output.read_text())
    assert refusals.pop(sound.stem)[0] is None
    for path in paths:
        error, taken = refusals[path.stem]
        assert error is not None, path
        is_limited = path.stem.startswith(("strings", "fields", "tensors"))
        assert is_limited == ("limit is" in error), error
        assert "is not aligned or overlaps another tensor" in error or "overlapping" not in path.stem
        assert taken < 300 * usual, path  # a file that is read in vain takes thousands of times as long
