"""Log-probabilities in OpenAI's shapes, with byte-level tokenizers and those of SentencePiece's kind."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from nanoengine.outputs import CompletionOutput, Logprob, RequestOutput
from nanoengine.server.openai_api import ChatRequest, CompletionRequest
from nanoengine.server.token_logprobs import TokenBytes
from tests.helpers import byte_tokenizer

SENTENCE = " Hello world! café 日本 \U0001f600"


def metaspace_tokenizer():
    """Return a tokenizer like Llama 2's: a visible space before words, a byte fallback, and a BOS."""
    words = [
        "▁",
        "▁Hello",
        "▁world",
        "Hello",
        "!",
        "▁caf",
        "c",
        "a",
        "f",
        "H",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "日",
    ]
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocabulary |= {word: 257 + i for i, word in enumerate(words)}
    merges: list = []
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    prepend = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([*prepend])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(content=" ", left=1, right=0)])
    backend.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {"metaspace": metaspace_tokenizer(), "bytes": byte_tokenizer(("Hello", " world", "日"))}


def entry_of(token_id, *others):
    return {one: Logprob(-1.0 - rank, rank + 1) for rank, one in enumerate((token_id, *others))}


def choices_of(body, tokenizer, prompt, said, size):
    """Return the pieces of an answer, which has `size` tokens per piece."""
    tokens, ids = TokenBytes(tokenizer), tokenizer(prompt).input_ids
    entries = [None, *(entry_of(one) for one in ids[1:])]
    for i in range(0, len(said), size):
        new = said[i : i + size]
        completion = CompletionOutput(0, "", new, logprobs=[entry_of(one) for one in new])
        yield body.choice(0, completion, RequestOutput("r", prompt, ids, [], False, 0, entries), tokens)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("size", [1, 3, 99])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["Hello", "a caf日", "<s>Hello"])
def test_offsets_are_where_tokens_are_in_the_text(prompt, echo, size, kind):
    tokenizer = TOKENIZERS[kind]
    said = tokenizer(
        SENTENCE.removeprefix(" ") if kind == "metaspace" else SENTENCE, add_special_tokens=False
    )
    said = [*said.input_ids, tokenizer.eos_token_id]
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
    text = SENTENCE.removeprefix(" ") if kind == "metaspace" else SENTENCE
    said = tokenizer(text, add_special_tokens=False).input_ids
    body = ChatRequest(messages=[], logprobs=True, top_logprobs=1)
    (choice,) = choices_of(body, tokenizer, "Hello", said, 99)
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == SENTENCE
    assert any(token["token"].startswith(" ") for token in content)
    assert all(token["bytes"] == token["top_logprobs"][0]["bytes"] for token in content)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_each_token_of_top_logprobs_has_a_name_of_its_own(kind):
    tokenizer = TOKENIZERS[kind]
    tokens, rng = TokenBytes(tokenizer), random.Random(0)
    assert tokens[len(tokenizer) + 5] == b"", "a row of the logits that no token has"
    for _ in range(50):
        ids = rng.sample(range(len(tokenizer) + 3), 20)
        names = tokens.names(entry_of(*ids))
        assert list(names.values()) == [-1.0 - rank for rank in range(20)]
    body = CompletionRequest(prompt="a", logprobs=3, return_tokens_as_token_ids=True)
    assert set(body.top_logprobs(entry_of(7, 200, 250), tokens)) == {
        "token_id:7",
        "token_id:200",
        "token_id:250",
    }
    assert TokenBytes(None).name(5) == ""
