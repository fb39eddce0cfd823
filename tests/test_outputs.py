"""The detokenizer: text as it arrives, and stop strings across token boundaries."""

import itertools
import random

import pytest
from tokenizers import Tokenizer

from nanoengine.detokenizer import Detokenizer, TokenTexts
from nanoengine.sampling_params import SamplingParams
from tests.helpers import byte_tokenizer, metaspace_tokenizer

SENTENCEPIECE = metaspace_tokenizer(["▁Hello", "▁world", "▁a", "b", "c", "▁", "!", "▁caf"]).backend_tokenizer
TEXT = "The quick brown fox jumps over the lazy dog — café, naïve, 日本語, 🙂🙃! " * 3


@pytest.fixture(scope="module")
def tokenizer():
    """Return a byte-level BPE with tokens of several characters and of parts of characters."""
    return byte_tokenizer().train_new_from_iterator([TEXT], 300, show_progress=False).backend_tokenizer


def fed(tokenizer, token_ids, prompt_ids=(), **params):
    """Return a detokenizer that has received these tokens, and is finished."""
    detokenizer = Detokenizer(tokenizer, list(prompt_ids), SamplingParams(**params))
    for token_id in token_ids:
        detokenizer.append(token_id)
    detokenizer.finish()
    return detokenizer


def feed(tokenizer, text, **params):
    """Return the text after each token until a stop string is found, and the stop string.

    Also checks that text only grows, by whole characters, and that its new parts make up the whole.
    """
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("Start:").ids, SamplingParams(**params))
    steps, pieces = [], []
    for token_id in tokenizer.encode(text).ids:
        stop = detokenizer.append(token_id)
        pieces.append(detokenizer.new_text())
        if stop is not None:
            break
        steps.append(detokenizer.text)
    detokenizer.finish()
    steps.append(detokenizer.text)
    assert "".join([*pieces, detokenizer.new_text()]) == steps[-1]
    assert detokenizer.new_text() == ""
    for before, after in itertools.pairwise(steps):
        assert after.startswith(before)
        assert "\ufffd" not in after
    return steps, stop


def test_text_grows_by_whole_characters_to_the_decoded_text(tokenizer):
    assert len(tokenizer.encode("日本語🙂").ids) > 4  # characters are split over tokens
    for stop in (None, ["absent"], "lazy dog?"):  # parts of a stop string are held back
        assert feed(tokenizer, TEXT, stop=stop)[0][-1] == TEXT


def test_stop_string_is_found_at_every_offset_and_across_tokens(tokenizer):
    for start in range(0, 60, 5):
        for length in (1, 2, 5, 11):
            stop = TEXT[start : start + length]
            steps, found = feed(tokenizer, TEXT, stop=stop)
            assert found == stop
            assert steps[-1] == TEXT[: TEXT.index(stop)]
            steps, _ = feed(tokenizer, TEXT, stop=stop, include_stop_str_in_output=True)
            assert steps[-1] == TEXT[: TEXT.index(stop) + length]


def test_first_stop_string_in_the_text_wins(tokenizer):
    steps, found = feed(tokenizer, TEXT, stop=["lazy", "brown", "fox"])
    assert (steps[-1], found) == ("The quick ", "brown")
    tokenizer = byte_tokenizer(("quick",)).backend_tokenizer
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=["ck", "ui", "u"]))
    assert detokenizer.append(tokenizer.token_to_id("quick")) == "ui"
    detokenizer.finish()
    assert detokenizer.text == "q"


def test_decoding_continues_after_an_invalid_byte_fallback_prefix():
    """A character, half a character, then a word: tokenizers' stream calls this an invalid prefix."""
    rng = random.Random(0)
    prompt, *end = (SENTENCEPIECE.token_to_id(token) for token in ("▁", "▁world", "!"))
    broken = [0x41 + 1, 0xE2 + 1, SENTENCEPIECE.token_to_id("▁a")]
    for ids in [broken, *([rng.randrange(1, 265) for _ in range(60)] for _ in range(50))]:
        assert fed(SENTENCEPIECE, ids + end, [prompt]).text.endswith("world!")


def test_cached_texts_of_tokens_change_no_text(tokenizer):
    """With invalid bytes, special tokens, and a token that spells the replacement character."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_tokens(["\ufffd", "é!"])
    tokenizer.add_special_tokens(["<tool>"])
    rng, size = random.Random(0), tokenizer.get_vocab_size()
    whole = [i for i in range(size) if "\ufffd" not in tokenizer.decode([i])]
    for skips in (True, False):
        shared = TokenTexts(tokenizer, skips)
        params = SamplingParams(skip_special_tokens=skips)
        for _ in range(20):
            quick, slow = (Detokenizer(tokenizer, [], params, texts) for texts in (shared, None))
            slow.texts.is_byte_level = False
            for _ in range(60):
                token_id = rng.choice(whole) if rng.random() < 0.6 else rng.randrange(size)
                assert quick.append(token_id) is slow.append(token_id) is None
                assert quick.new_text() == slow.new_text()
            quick.finish()
            slow.finish()
            assert quick.text == slow.text
        assert any(shared.values())
        assert not any(slow.texts.values())


def test_leading_space_of_the_output_is_kept():
    ids = [SENTENCEPIECE.token_to_id(token) for token in ("▁world", "!", "▁caf")]
    ids += [byte + 1 for byte in "é 日".encode()]
    prompt = [SENTENCEPIECE.token_to_id(token) for token in ("▁Hello", "▁a", "b", "c")]
    for given in (prompt, prompt[:1], prompt * 3):
        assert fed(SENTENCEPIECE, ids, given).text == " world! café 日"


@pytest.mark.parametrize("stop", [None, ["never said"]])
def test_the_whole_text_after_each_token_joins_few_pieces(tokenizer, stop):
    """A stream of whole texts would otherwise cost more with each token."""
    detokenizer, sizes = Detokenizer(tokenizer, [1], SamplingParams(stop=stop)), set()
    for token_id in tokenizer.encode(TEXT).ids:
        detokenizer.append(token_id)
        sizes.add(len(detokenizer.pieces))
        assert TEXT.startswith(detokenizer.text)
    assert max(sizes) <= 3
    detokenizer.finish()
    assert detokenizer.text == detokenizer.new_text() == TEXT


@pytest.mark.parametrize("special", [[], [256]], ids=["", "before a special token"])
def test_whole_characters_of_an_incomplete_last_token_are_kept(special):
    tokenizer = byte_tokenizer((" \udce4\udcb8", "a\udcff b\udce4")).backend_tokenizer
    for token, text in ((257, "ok "), (258, "oka\ufffd b")):
        detokenizer = fed(tokenizer, [*tokenizer.encode("ok").ids, token, *special], [1, 2, 3, 4])
        assert detokenizer.text == detokenizer.new_text() == text


def test_stop_string_in_an_incomplete_last_token_is_not_shown():
    tokenizer = byte_tokenizer(("a\udcff b\udce4",)).backend_tokenizer
    assert fed(tokenizer, [257], stop=["b"]).text == "a\ufffd "
