"""Log-probabilities in OpenAI's shapes, with byte-level tokenizers and those of SentencePiece's kind."""

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from nanoengine.outputs import CompletionOutput, Logprob, RequestOutput
from nanoengine.server.openai_api import ChatRequest, CompletionRequest, Progress
from nanoengine.server.token_logprobs import TokenNames
from nanoengine.token_bytes import TokenBytes
from tests.helpers import byte_tokenizer, metaspace_tokenizer

SENTENCE = " Hello world! café 日本 \U0001f600"


def trained_tokenizer(model, trainer, normalizer, pre_tokenizer, decoder):
    """Return a tokenizer whose tokens are words, and <s> and </s>, trained on the sentence."""
    backend = Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizer, pre_tokenizer, decoder
    backend.train_from_iterator([SENTENCE, "Hello a caf日"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


TRAINING: dict[str, Any] = {"show_progress": False, "vocab_size": 60}
TRAINING["special_tokens"] = ["<unk>", "<s>", "</s>"]
WORDS = ["▁", "▁Hello", "▁world", "Hello", "!", "▁caf", *"cafHelowrd日"]
TOKENIZERS = {"metaspace": metaspace_tokenizer(WORDS), "bytes": byte_tokenizer(("Hello", " world", "日"))}
TOKENIZERS["unigram"] = trained_tokenizer(
    *(models.Unigram(), trainers.UnigramTrainer(unk_token="<unk>", **TRAINING), normalizers.NFKC()),
    *(pre_tokenizers.Metaspace(), decoders.Metaspace()),
)
TOKENIZERS["wordpiece"] = trained_tokenizer(
    *(models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer(**TRAINING)),
    *(normalizers.BertNormalizer(lowercase=False, handle_chinese_chars=False, strip_accents=False),),
    *(pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()),
)


def entry_of(token_id, *others):
    return {one: Logprob(-1.0 - rank, rank + 1) for rank, one in enumerate((token_id, *others))}


def choices_of(body, tokenizer, prompt, said, size):
    """Return the pieces of an answer, which has `size` tokens per piece."""
    tokens, ids, progress = TokenNames(tokenizer), tokenizer(prompt).input_ids, Progress(0)
    entries = [None, *(entry_of(one) for one in ids[1:])]
    for i in range(0, len(said), size):
        new = said[i : i + size]
        completion = CompletionOutput(0, "", new, logprobs=[entry_of(one) for one in new])
        output = RequestOutput("r", prompt, ids, [], False, 0, entries)
        yield body.choice(progress, completion, output, tokens)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("size", [1, 3, 99])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["Hello", "a caf日", "<s>Hello"])
def test_offsets_are_where_tokens_are_in_the_text(prompt, echo, size, kind):
    tokenizer = TOKENIZERS[kind]
    said = tokenizer(SENTENCE[kind != "bytes" :], add_special_tokens=False).input_ids
    said.append(tokenizer.eos_token_id)
    body = CompletionRequest(prompt=prompt, logprobs=1, echo=echo, max_tokens=99)
    found = [one["logprobs"] for one in choices_of(body, tokenizer, prompt, said, size)]
    ids = [*(tokenizer(prompt).input_ids if echo else []), *said]
    offsets = [offset for one in found for offset in one["text_offset"]]
    names = [name for one in found for name in one["tokens"]]
    text = (prompt if echo else "") + SENTENCE
    assert len(offsets) == len(names) == len(ids)
    for i, (token_id, name, offset) in enumerate(zip(ids, names, offsets, strict=True)):
        if i == 0 and echo and kind == "metaspace":  # the BOS is no text, unless the prompt says it
            assert (name, offset) == ("<s>", 0)
        elif name == "<s>":  # the first one may be that of the text as well
            assert offset in (0, 3)
        elif token_id == tokenizer.eos_token_id:
            assert (name, offset) == (tokenizer.eos_token, len(text))
        elif name.startswith("bytes:"):
            assert text[offset].encode().find(bytes.fromhex(name[6:].replace("\\x", ""))) >= 0
        elif offset in (0, 3) and not text.startswith(name, offset):  # a space put before text
            assert name[0] == " "
            assert text.startswith(name[1:], offset)
        else:
            assert text.startswith(name, offset), (name, offset)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_bytes_of_a_chat_s_tokens_are_those_of_its_text(kind):
    tokenizer = TOKENIZERS[kind]
    said = tokenizer(SENTENCE[kind != "bytes" :], add_special_tokens=False).input_ids
    body = ChatRequest(messages=[], logprobs=True, top_logprobs=1)
    (choice,) = choices_of(body, tokenizer, "Hello", said, 99)
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == SENTENCE
    assert any(token["token"].startswith(" ") for token in content)
    assert all(token["bytes"] == token["top_logprobs"][0]["bytes"] for token in content)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_each_token_of_top_logprobs_has_a_name_of_its_own(kind):
    tokenizer = TOKENIZERS[kind]
    tokens, rng = TokenNames(tokenizer), random.Random(0)
    assert tokens[len(tokenizer) + 5] == b"", "a row of the logits that no token has"
    for _ in range(50):
        ids = rng.sample(range(len(tokenizer) + 3), 20)
        names = tokens.names(dict(reversed(entry_of(*ids).items())))
        assert list(names.values()) == [-1.0 - rank for rank in range(20)]
    body = CompletionRequest(prompt="a", logprobs=3, return_tokens_as_token_ids=True)
    assert {*tokens.names(entry_of(7, 200, 250), by_id=True)} == {f"token_id:{one}" for one in (7, 200, 250)}
    (choice,) = choices_of(body, tokenizer, "Hello", [7, 8], 99)
    assert choice["logprobs"]["tokens"] == ["token_id:7", "token_id:8"]
    chat = ChatRequest(messages=[], logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    (choice,) = choices_of(chat, tokenizer, "Hello", [7, 8], 99)
    for token_id, entry in zip((7, 8), choice["logprobs"]["content"], strict=True):
        assert entry["token"] == entry["top_logprobs"][0]["token"] == f"token_id:{token_id}"
    assert TokenNames(None).name(5) == ""


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("size", [1, 2, 99])
def test_the_texts_of_tokens_joined_are_the_text(size, kind):
    """The token that completes a character has all of it. Other tokens reported with it change nothing."""
    tokenizer, begun, names = TOKENIZERS[kind], b"", []
    tokens, ids = TokenBytes(tokenizer), tokenizer(f"Hello{SENTENCE}", add_special_tokens=False).input_ids
    for i in range(0, len(ids), size):  # entries arrive a few at a time
        entries = [entry_of(one, *({3, 40, 45} - {one})) for one in ids[i : i + size]]
        begun = tokens.name_entries(entries, begun)
        names += [next(iter(entry.values())).decoded_token for entry in entries]
    assert "".join(names).removeprefix(" ") == f"Hello{SENTENCE}"
    assert begun == b""
    assert all("\ufffd" not in name for name in names)


def test_an_added_token_that_is_not_special_has_a_place_in_the_text():
    tokenizer = byte_tokenizer(())
    tokenizer.add_tokens(["<x>"])
    assert TokenNames(tokenizer).offsets([len(tokenizer) - 1], 5, skip_special_tokens=True) == [5, 8]


def test_other_tokens_after_part_of_a_character_complete_it_or_begin_their_own():
    entry = entry_of(0xC3, ord("x"), 0xA9, 0xC4)
    assert TokenBytes(TOKENIZERS["bytes"]).name_entries([entry], "é".encode()[:1]) == b"\xc3"
    assert [one.decoded_token for one in entry.values()] == ["\ufffd", "x", "é", ""]


@pytest.mark.parametrize(
    ("kind", "text", "names"),
    [
        ("wordpiece", "Hello   a caf", {0: " H", 7: " a", 9: " c"}),
        ("unigram", "Hello \uff41 caf", {5: " ", 6: "a", 7: " "}),  # the normalizer changes a letter
        ("trimmed", "Hello  world", {0: "Hello", 5: " ", 6: " world"}),
        ("trimmed", "日 日", {0: "日", 1: " "}),
    ],
)
def test_a_prompt_s_offsets_are_where_the_tokenizer_read_its_tokens(kind, text, names):
    """Even where it left out spaces, changed the text, or leaves spaces out of what it says."""
    tokenizer = TOKENIZERS.get(kind)
    if tokenizer is None:
        tokenizer = byte_tokenizer(("Hello", " world", "日"))
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokens, ids = TokenNames(tokenizer), tokenizer(text).input_ids
    found = dict(zip(offsets := tokens.offsets_in(text, ids), map(tokens.name, ids), strict=True))
    assert offsets == sorted(offsets)
    assert all(found[place].startswith(name) for place, name in names.items()), found
