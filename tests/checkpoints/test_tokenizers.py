"""Tokenizers of others' checkpoints: their ids are those of the library `tokenizers` with the same file."""

import json
from functools import cache
from itertools import product

import pytest
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, processors, trainers
from tokenizers import normalizers as norm
from tokenizers import pre_tokenizers as pre

from nanoengine import LLM, SamplingParams, StructuredOutputsParams
from nanoengine.checkpoints.gguf_tokenizer import LLAMA3, QWEN2
from nanoengine.checkpoints.tokenizer import load_tokenizer
from tests.helpers import TINY

CORPUS = ["def f(x):\n    return x\n", "Hello world, 12345 times 7! It's the  end.\n\n", "日本語 and é"] * 3
TEXTS = "def f(x): return x|| hello|hello|  two|a\n\n\nb\tc|1234 and 12|日本語é \U0001f642|"
TEXTS += "<s>Hello</s> world</s>the| <tool> x<tool>  end|swords word words|It's THE\r\n end |e\u0301"
PROBES = TEXTS.split("|")
VISIBLE, TO_BYTES = norm.Replace(" ", "\u2581"), pre.ByteLevel(False, use_regex=False)
SPELLED = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()
STRIPPED, UNSTRIPPED = decoders.Sequence([*SPELLED, decoders.Strip(" ", 1, 0)]), decoders.Sequence([*SPELLED])
# How the files of published models are laid out: normalizer, pre-tokenizers and decoder.
BYTE_LEVEL = {
    "gpt2": [pre.ByteLevel(False)],
    "roberta": [pre.ByteLevel(True)],
    "llama3": [pre.Split(Regex(LLAMA3), "isolated"), TO_BYTES],
    "qwen2": [pre.Split(Regex(QWEN2), "isolated"), TO_BYTES],
    "starcoder2": [pre.Digits(True), pre.ByteLevel(False)],
    "falcon": [pre.Punctuation("contiguous"), pre.ByteLevel(False), pre.Digits(False)],
    "bloom": [pre.Split(Regex(r" ?[^(\s|[.,!?…])]+"), "isolated"), TO_BYTES],
}
SENTENCE_PIECE = {
    "llama2": (norm.Sequence([norm.Prepend("\u2581"), VISIBLE]), None, STRIPPED),
    "gemma": (VISIBLE, pre.Split(" ", "merged_with_previous"), UNSTRIPPED),
    "first": (None, pre.Metaspace(prepend_scheme="first", split=False), STRIPPED),
    "always": (None, pre.Metaspace(prepend_scheme="always"), STRIPPED),
    "never": (None, pre.Metaspace(prepend_scheme="never", split=False), UNSTRIPPED),
    "digits": (VISIBLE, pre.Digits(True), UNSTRIPPED),
}
UNKNOWN, PIECES = {"unk_token": "<unk>"}, decoders.WordPiece()
OTHERS = {
    "unigram": (models.Unigram(), norm.NFKC(), pre.Metaspace(), decoders.Metaspace()),
    "wordpiece": (models.WordPiece(**UNKNOWN), norm.BertNormalizer(), pre.BertPreTokenizer(), PIECES),
    "words": (models.WordLevel(**UNKNOWN), norm.Lowercase(), pre.Whitespace(), decoders.WordPiece("#")),
}
LAYOUTS = *BYTE_LEVEL, *SENTENCE_PIECE, *OTHERS
NAMES = "llama mistral qwen2 qwen3 cohere falcon opt gpt_neox starcoder2 gemma2 phi3 gpt2 bloom stablelm"
TYPES = NAMES.split()
CLASSES = None, "LlamaTokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast", "Qwen2Tokenizer"
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}


@cache
def layout(name):
    """Return the tokenizer.json of a layout. It truncates and pads, and has added tokens with all flags."""
    settings = {"vocab_size": 420, "show_progress": False, "special_tokens": ["<unk>", "<s>", "</s>"]}
    if name in BYTE_LEVEL:
        backend = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
        parts = norm.NFC() if name == "qwen2" else None, pre.Sequence(BYTE_LEVEL[name]), decoders.ByteLevel()
        settings["initial_alphabet"] = pre.ByteLevel.alphabet()
    elif name in SENTENCE_PIECE:
        backend, parts = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>")), SENTENCE_PIECE[name]
        settings["special_tokens"] += [f"<0x{i:02X}>" for i in range(256)]
    else:
        backend, parts = Tokenizer(OTHERS[name][0]), OTHERS[name][1:]
        settings |= {"unk_token": "<unk>"} if name == "unigram" else {}
    backend.normalizer, backend.pre_tokenizer, backend.decoder = parts
    kind = type(backend.model).__name__.replace("BPE", "Bpe")
    backend.train_from_iterator(CORPUS, getattr(trainers, f"{kind}Trainer")(**settings))
    backend.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True), AddedToken("word", single_word=True)])
    if name not in ("gpt2", "starcoder2", "first"):
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(3)
    backend.enable_padding(length=9, pad_id=2, pad_token="</s>")
    return backend.to_str()


def expected(content):
    """Return the library's own tokenizer of a file, without truncation and padding."""
    backend = Tokenizer.from_str(content)
    backend.no_truncation()
    backend.no_padding()
    return backend


def write(path, content, model_type="llama", **settings):
    """Write a tokenizer.json and what stands beside it."""
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (path / "tokenizer.json").write_text(content)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def check_same(loaded, backend):
    for text in PROBES:
        encoding = backend.encode(text)
        assert loaded(text).input_ids == encoding.ids, text
        plain = backend.encode(text, add_special_tokens=False).ids
        assert loaded.encode(text, add_special_tokens=False) == plain, text
        assert loaded.backend_tokenizer.decode(encoding.ids) == backend.decode(encoding.ids), text
    assert loaded.get_vocab() == backend.get_vocab()


def cases():
    """Return each layout with each model type. By default few run, each layout and type several times."""
    for i, (name, kind) in enumerate(product(LAYOUTS, TYPES)):
        for j, declared in enumerate(CLASSES):
            quick = (i + len(CLASSES) * (i // len(TYPES)) + 3 * j) % 28 == 0
            if quick or (i + j) % 3 == 0:  # one or two classes for each layout and type
                yield pytest.param(name, kind, declared, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "kind", "declared"), [*cases()])
def test_the_ids_are_those_of_tokenizer_json_whatever_the_class(name, kind, declared, tmp_path):
    settings = {"tokenizer_class": declared} if declared else {}
    path = write(tmp_path, layout(name), kind, **ENDS, unk_token="<unk>", **settings)
    loaded = load_tokenizer(path, False)
    check_same(loaded, expected(layout(name)))
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.unk_token_id) == (1, 2, 0)


THREE, BOTH = ("gpt2", "llama3", "llama2"), ("add_bos_token", "add_eos_token")


@pytest.mark.parametrize(
    ("name", "flags", "before", "after"),
    [
        *[(name, {}, name != "gpt2", False) for name in THREE],
        *[(name, dict.fromkeys(BOTH, None), True, False) for name in ("llama2", "unigram")],
        *[(name, {"add_eos_token": True}, name != "gpt2", True) for name in THREE],
        *[(name, {"add_bos_token": False}, False, False) for name in (*THREE, "wordpiece")],
        *[(name, dict.fromkeys(BOTH, True), True, True) for name in ("gpt2", "llama2")],
        ("llama3", {"add_bos_token": False, "add_eos_token": True}, False, True),
        ("llama2", {"add_bos_token": True, "bos_token": None}, True, False),  # no token to follow the flag
    ],
)
def test_flags_for_bos_and_eos_are_followed_unless_they_are_null(name, flags, before, after, tmp_path):
    path = write(tmp_path, layout(name), **{**ENDS, **flags})
    loaded, backend = load_tokenizer(path, False), expected(layout(name))
    for text in PROBES:
        plain = backend.encode(text, add_special_tokens=False).ids
        assert loaded(text, add_special_tokens=False).input_ids == plain
        assert loaded(text).input_ids == [1] * before + plain + [2] * after


@pytest.mark.parametrize("name", ["roberta", "gpt2", "falcon", "llama2", "first", "always", "never", "gemma"])
def test_the_flag_for_a_space_before_the_text_is_followed_unless_it_is_null(name, tmp_path):
    def tokens(flag):
        path = write(tmp_path, layout(name), tokenizer_class="PreTrainedTokenizerFast", add_prefix_space=flag)
        return load_tokenizer(path, False).tokenize("def</s>def")

    own = expected(layout(name)).encode("def</s>def", add_special_tokens=False).tokens
    marks = "\u2581", "\u0120"
    assert tokens(None) == own
    assert not tokens(False)[0].startswith(marks)
    assert tokens(True)[0].startswith(marks)
    assert (tokens(False) == own) == (not own[0].startswith(marks))


def test_flags_of_bert_are_followed_unless_they_are_null(tmp_path):
    for flag, token in (None, "def"), (True, "def"), (False, "<unk>"):
        path = write(tmp_path, layout("wordpiece"), do_lower_case=flag, tokenizer_class="TokenizersBackend")
        assert load_tokenizer(path, False).tokenize("DEF") == [token]


FLAGS = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}


def test_tokens_that_only_the_files_beside_it_have_are_added_with_their_ids(tmp_path, caplog):
    """A token without an id gets the next one. A pad_token becomes none."""
    content, size = layout("gpt2"), expected(layout("gpt2")).get_vocab_size()
    stated = {size + 1: "<|b|>", size: "<|a|>", 7: "<|taken|>", size + 9: "<|far|>"}
    stated = {i: {"content": name, **FLAGS} for i, name in stated.items()}
    others = {"pad_token": "x", "extra_special_tokens": ["<|c|>"]}
    loaded = load_tokenizer(write(tmp_path, content, "phi3", added_tokens_decoder=stated, **others), False)
    x, xx = (loaded(text).input_ids for text in ("x", "xx"))
    assert loaded("<|b|>x<|c|>xx<|a|>").input_ids == [size + 1, *x, size + 2, *xx, size]
    assert loaded.get_vocab().keys() - expected(content).get_vocab().keys() == {"<|a|>", "<|b|>", "<|c|>"}
    for token, place in ("<|taken|>", 7), ("<|far|>", size + 9):
        assert f"tokenizer.json has no place for the token {token!r} at {place}" in caplog.text
    write(tmp_path, content, "llama")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|alone|>": size}))
    special = {"eos_token": {"content": "<|end|>", **FLAGS}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    loaded = load_tokenizer(tmp_path, False)
    assert loaded("<|alone|><|end|>").input_ids == [size, size + 1]
    assert loaded.eos_token_id == size + 1


@pytest.mark.parametrize("flag", ["special", "lstrip", "rstrip", "single_word"])
def test_flags_of_an_added_token_are_those_of_tokenizer_config_as_in_transformers(flag, tmp_path):
    backend = Tokenizer.from_str(layout("gpt2"))
    flags = FLAGS | {"special": False}
    backend.add_tokens([AddedToken("<x>", **flags)])
    stated = {backend.token_to_id("<x>"): {"content": "<x>", **flags, flag: True}}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    path, read = write(tmp_path, backend.to_str(), added_tokens_decoder=stated, **kind), []
    for loaded in load_tokenizer(path, False), transformers.AutoTokenizer.from_pretrained(path):
        ids = [loaded(text).input_ids for text in ("a <x> b", "a<x>b")]
        read.append((ids, loaded.decode(ids[1], skip_special_tokens=True)))
    plain = [backend.encode(text).ids for text in ("a <x> b", "a<x>b")]
    assert read[0] == read[1] != (plain, "a<x>b")


def test_a_default_of_the_class_that_the_file_lacks_is_no_token(tmp_path):
    backend = Tokenizer(models.WordLevel({"a": 0, "<none>": 1}, unk_token="<none>"))
    loaded = load_tokenizer(write(tmp_path, backend.to_str()), False)
    assert (loaded.bos_token, loaded.eos_token, loaded.unk_token) == (None, None, None)
    assert loaded.get_vocab() == {"a": 0, "<none>": 1}


@pytest.mark.parametrize("fails", [True, False])
def test_the_file_is_enough_where_transformers_class_is_not(fails, tmp_path, monkeypatch, caplog):
    """mistral-common's class, for a tekken.json, accepts no text. Other classes need files or packages."""

    def from_pretrained(path, **settings):
        if fails:
            raise ImportError("needs a package")
        return object()

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", from_pretrained)
    path = write(tmp_path, layout("llama3"), "mistral", bos_token="<s>", chat_template="{{ bos_token }}")
    (path / "tekken.json").write_text("{}")
    loaded = load_tokenizer(path, False)
    check_same(loaded, expected(layout("llama3")))
    assert loaded.apply_chat_template([{"role": "user", "content": ""}], tokenize=False) == "<s>"
    assert ("AutoTokenizer fails (needs a package)" in caplog.text) == fails


@pytest.mark.parametrize(("name", "differs"), [("llama2", True), ("first", False)])
def test_other_ids_of_transformers_are_logged(name, differs, tmp_path, caplog):
    load_tokenizer(write(tmp_path, layout(name), tokenizer_class="LlamaTokenizer", unk_token="<unk>"), False)
    assert ("transformers' LlamaTokenizer gives other token ids" in caplog.text) == differs


def test_a_template_may_stand_in_a_file_of_its_own(tmp_path):
    """Processors of multimodal models save chat_template.json. A template elsewhere comes first."""
    path = write(tmp_path, layout("gpt2"), "qwen2")
    assert load_tokenizer(path, False).chat_template is None
    (path / "chat_template.json").write_text('{"chat_template": "{{ 1 }}"}')
    assert load_tokenizer(path, False).chat_template == "{{ 1 }}"
    (path / "chat_template.jinja").write_text("{{ 2 }}")
    assert load_tokenizer(path, False).chat_template == "{{ 2 }}"


def test_all_that_reads_the_vocabulary_reads_the_files(tmp_path, caplog):
    """The prompt, the text and grammars follow tokenizer.json. A second BOS is told once."""
    path = write(tmp_path, layout("llama2"), tokenizer_class="LlamaTokenizer", **ENDS)
    config = transformers.LlamaConfig(**{**TINY, "vocab_size": 512}, architectures=["LlamaForCausalLM"])
    config.save_pretrained(path)
    backend, text = expected(layout("llama2")), "<s>  two</s> def"
    with LLM(path, load_format="dummy", num_kv_blocks=4) as llm:
        params = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=[" x  def"]))
        output = llm.generate(text, params, use_tqdm=False)[0]
        assert output.prompt_token_ids == llm.get_tokenizer()(text).input_ids == backend.encode(text).ids
        assert output.outputs[0].text == " x  def"
        llm.generate([text, "two"], params, use_tqdm=False)
    assert output.prompt_token_ids[:2] == [1, 1]
    assert caplog.text.count("a prompt begins with <s>, and the tokenizer adds one more") == 1
