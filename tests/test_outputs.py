"""Text as it arrives, and stop strings across token boundaries."""

import itertools
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nanoengine.detokenizer import Detokenizer, TokenTexts
from nanoengine.sampling_params import SamplingParams
from tests.helpers import byte_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog — café, naïve, 日本語, 🙂🙃! " * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level BPE whose tokens split characters, and hold several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def feed(tokenizer, text, **params):
    """The text and the stop string after each token, until one is found."""
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("Start:").ids, SamplingParams(**params))
    steps = []
    for token_id in tokenizer.encode(text).ids:
        stop = detokenizer.append(token_id)
        if stop is not None:
            break
        steps.append(detokenizer.text)
    detokenizer.finish()
    return [*steps, detokenizer.text], stop


def test_the_text_grows_to_exactly_the_decoded_text_by_whole_characters(tokenizer):
    assert len(tokenizer.encode("日本語🙂").ids) > 4  # characters are split over tokens
    steps, _ = feed(tokenizer, TEXT)
    assert steps[-1] == TEXT
    for before, after in itertools.pairwise(steps):
        assert after.startswith(before)
        assert "\ufffd" not in after


def test_an_unfinished_character_at_the_end_is_never_shown(tokenizer):
    ids = tokenizer.encode("ok 🙂").ids
    detokenizer = Detokenizer(tokenizer, [1, 2, 3, 4], SamplingParams())
    for token_id in ids[:-1]:
        detokenizer.append(token_id)
    detokenizer.finish()
    assert detokenizer.text in ("ok", "ok ")  # the space may be in one token with the first bytes


def test_a_stop_string_is_found_at_every_offset_and_across_tokens(tokenizer):
    for start in range(0, 60, 3):
        for length in (1, 2, 5, 11):
            stop = TEXT[start : start + length]
            steps, found = feed(tokenizer, TEXT, stop=stop)
            assert found == stop
            assert steps[-1] == TEXT[: TEXT.index(stop)]
            steps, _ = feed(tokenizer, TEXT, stop=stop, include_stop_str_in_output=True)
            assert steps[-1] == TEXT[: TEXT.index(stop) + length]


def test_the_stop_string_that_comes_first_in_the_text_wins(tokenizer):
    steps, found = feed(tokenizer, TEXT, stop=["lazy", "brown", "fox"])
    assert (steps[-1], found) == ("The quick ", "brown")


def test_of_several_stop_strings_in_one_token_the_first_in_the_text_wins():
    tokenizer = byte_tokenizer(("quick",)).backend_tokenizer
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=["ck", "ui", "u"]))
    assert detokenizer.append(tokenizer.token_to_id("quick")) == "ui"
    detokenizer.finish()
    assert detokenizer.text == "q"


def test_a_stream_that_byte_fallback_breaks_begins_afresh(sentencepiece_like):
    """A whole character, then half a one, then a word: the stream calls this an invalid prefix."""
    rng = random.Random(0)
    prompt = [sentencepiece_like.token_to_id("▁")]
    broken = [0x41 + 1, 0xE2 + 1, sentencepiece_like.token_to_id("▁a")]
    for ids in [broken, *([rng.randrange(1, 265) for _ in range(60)] for _ in range(200))]:
        detokenizer = Detokenizer(sentencepiece_like, prompt, SamplingParams())
        for token_id in ids:
            detokenizer.append(token_id)
        detokenizer.append(sentencepiece_like.token_to_id("▁world"))
        detokenizer.append(sentencepiece_like.token_to_id("!"))
        detokenizer.finish()
        assert detokenizer.text.endswith("world!")


def test_a_stop_string_that_never_comes_changes_nothing(tokenizer):
    assert feed(tokenizer, TEXT, stop=["absent"])[0][-1] == TEXT


def test_what_may_begin_a_stop_string_is_held_back_so_nothing_shown_is_taken_back(tokenizer):
    for stop in ("lazy dog", "café", "🙂🙃", "x"):
        steps, _ = feed(tokenizer, TEXT, stop=stop)
        for before, after in itertools.pairwise(steps):
            assert after.startswith(before)


def test_texts_of_single_tokens_change_nothing_about_the_text(tokenizer):
    """Beside invalid bytes, special tokens, and a token that spells the replacement character."""
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


def test_new_text_comes_in_pieces_that_make_up_the_text(tokenizer):
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop="lazy dog?"))
    pieces = []
    for token_id in tokenizer.encode(TEXT).ids:
        detokenizer.append(token_id)
        pieces.append(detokenizer.new_text())
    detokenizer.finish()
    assert "".join([*pieces, detokenizer.new_text()]) == detokenizer.text == TEXT
    assert detokenizer.new_text() == ""


def test_a_stop_string_that_was_not_allowed_yet_is_not_found_later(tokenizer):
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=["b", "xxxxxx"], min_tokens=2))
    ids = [tokenizer.encode(letter).ids[0] for letter in "abcb"]
    found = [detokenizer.append(token_id) for token_id in ids]
    detokenizer.finish()
    assert (found, detokenizer.text) == ([None, None, None, "b"], "abc")


def test_the_cost_of_a_token_does_not_grow_with_the_text(tokenizer):
    """The window that is searched stays as short as the longest stop string."""
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=["abcdefghij"]))
    for token_id in tokenizer.encode(TEXT * 20).ids:
        detokenizer.append(token_id)
        assert len(detokenizer.held_back) <= 9


@pytest.fixture(scope="module")
def sentencepiece_like() -> Tokenizer:
    """Words begin with a visible space, unknown characters fall back to bytes, as in Llama 2."""
    words = ["▁Hello", "▁world", "▁a", "b", "c", "▁", "!", "▁caf"]
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocabulary |= {word: 257 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def test_the_space_that_begins_the_output_is_kept_with_a_sentencepiece_tokenizer(sentencepiece_like):
    ids = [sentencepiece_like.token_to_id(token) for token in ("▁world", "!", "▁caf")]
    ids += [byte + 1 for byte in "é 日".encode()]
    prompt = [sentencepiece_like.token_to_id(token) for token in ("▁Hello", "▁a", "b", "c")]
    for given in (prompt, prompt[:1], prompt * 3):
        detokenizer = Detokenizer(sentencepiece_like, given, SamplingParams())
        for token_id in ids:
            detokenizer.append(token_id)
        detokenizer.finish()
        assert detokenizer.text == " world! café 日"


def test_special_tokens_are_skipped_unless_asked_for(tokenizer):
    eos = tokenizer.token_to_id("<eos>")
    for skip, expected in ((True, "ab"), (False, "a<eos>b")):
        detokenizer = Detokenizer(tokenizer, [], SamplingParams(skip_special_tokens=skip))
        for token_id in [*tokenizer.encode("a").ids, eos, *tokenizer.encode("b").ids]:
            detokenizer.append(token_id)
        assert detokenizer.text == expected


def test_invalid_bytes_become_replacement_characters_and_do_not_stop_the_stream(tokenizer):
    rng = random.Random(0)
    for _ in range(200):
        detokenizer = Detokenizer(tokenizer, [], SamplingParams())
        ids = [rng.randrange(1, tokenizer.get_vocab_size()) for _ in range(40)]
        ids += tokenizer.encode(" the end").ids
        for token_id in ids:
            detokenizer.append(token_id)
        detokenizer.finish()
        assert detokenizer.text == tokenizer.decode(ids)


@pytest.mark.parametrize("special", [False, True], ids=["", "with a special token behind"])
def test_the_whole_characters_of_a_last_token_that_ends_inside_one_are_kept(special):
    tokenizer = byte_tokenizer((" \udce4\udcb8", "a\udcff b\udce4")).backend_tokenizer
    ids = tokenizer.encode("ok").ids
    for token, text in ((257, "ok "), (258, "oka\ufffd b")):
        detokenizer = Detokenizer(tokenizer, [1, 2, 3, 4], SamplingParams())
        for token_id in [*ids, token, *[256] * special]:
            detokenizer.append(token_id)
        detokenizer.finish()
        assert detokenizer.text == detokenizer.new_text() == text


def test_a_stop_string_in_a_last_token_that_ends_inside_a_character_is_not_shown():
    tokenizer = byte_tokenizer(("a\udcff b\udce4",)).backend_tokenizer
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=["b"]))
    assert detokenizer.append(257) is None
    detokenizer.finish()
    assert detokenizer.text == "a\ufffd "
