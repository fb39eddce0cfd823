"""The life of a request: streaming, chat, prompt log-probabilities, bad words, errors of one request."""

import itertools
import math
import pickle
import random
import string
from collections import Counter
from enum import IntEnum
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from nanoengine import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from nanoengine.checkpoints import gguf_tokenizer
from nanoengine.requests import RequestChecker, bad_word_ids, check_prompt_ids
from tests.helpers import DEMO, chain_checkpoint, checkpoint, random_params, random_prompts, table_checkpoint


@pytest.fixture(scope="module")
def llm(babbler):
    """Yield an engine with random answers, for tests that leave it empty."""
    with LLM(babbler, num_kv_blocks=60, block_size=8, max_num_seqs=16) as llm:
        yield llm
        assert llm.metrics()["num_free_blocks"] == 60


def test_streams_add_up_to_the_outputs_of_generate(llm):
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 30))] for _ in range(24)]
    params = [random_params(rng) for _ in prompts]
    expected = llm.generate(prompts, params, use_tqdm=False)
    streamed, order, finished = [{} for _ in prompts], [], []
    for output in llm.stream(prompts, params):
        order.append(i := int(output.request_id))
        assert i not in finished, "an output after the last one"
        for new in output.outputs:
            text, ids, num_logprobs = streamed[i].get(new.index, ("", [], 0))
            parts = [text + new.text, ids + new.token_ids, num_logprobs + len(new.logprobs or [])]
            streamed[i][new.index] = parts
        finished += [i] * output.finished
    assert not llm.has_unfinished_requests()
    assert len([i for i, _ in itertools.groupby(order)]) > 40, "the streams are interleaved"
    assert sorted(finished) == list(range(24))
    for output, parts, asked in zip(expected, streamed, params, strict=True):
        for whole in output.outputs:
            assert parts[whole.index] == [whole.text, whole.token_ids, len(whole.logprobs or [])]
            if "\ufffd" not in asked.stop_strings and not asked.include_stop_str_in_output:
                assert not any(stop in whole.text for stop in asked.stop_strings)


def test_closed_engine_ends_open_streams_with_abort(babbler):
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    llm = LLM(babbler, num_kv_blocks=60, block_size=8)
    stream = llm.stream([[1], [2]], params)
    next(stream)
    llm.close()
    left = {output.request_id: output for output in stream}
    assert sorted(left) == ["0", "1"]
    assert all(o.finished and o.outputs[0].finish_reason == "abort" for o in left.values())
    assert len(left["1"].outputs[0].token_ids) == 1  # it was computed, but not returned yet


def test_step_serves_an_open_stream_too(llm):
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    expected = [o.outputs[0].token_ids for o in llm.generate([[1], [2]], params, use_tqdm=False)]
    stream = llm.stream([[1]], params)
    assert not llm.has_unfinished_requests()  # nothing is queued before the first output is requested
    first = next(stream).outputs[0].token_ids
    llm.add_request("0", [2], params)  # an id of its own, although the stream also counts from 0
    steps = 0
    while llm.has_unfinished_requests():
        outputs = llm.step()
        steps += 1
    assert steps == 9
    assert [(o.request_id, o.outputs[0].token_ids) for o in outputs] == [("0", expected[1])]
    (rest,) = stream  # everything since, as one output
    assert first + rest.outputs[0].token_ids == expected[0]


def test_step_returns_outputs_of_the_requested_kind(tmp_path):
    asked = [(SamplingParams(temperature=0, max_tokens=4, output_kind=one), one) for one in RequestOutputKind]
    asked.append((SamplingParams(temperature=0, max_tokens=20, stop="def"), "stop"))
    with LLM(str(chain_checkpoint(tmp_path, "abcdefgh")), num_kv_blocks=10) as llm:
        for params, name in asked:
            llm.add_request(str(name), "a", params)
        texts = {str(name): [] for _, name in asked}
        while llm.has_unfinished_requests():
            for output in llm.step():
                texts[output.request_id].append(output.outputs[0].text)
    assert texts == {
        "RequestOutputKind.CUMULATIVE": ["b", "bc", "bcd", "bcde"],
        "RequestOutputKind.DELTA": ["b", "c", "d", "e"],
        "RequestOutputKind.FINAL_ONLY": ["bcde"],
        "stop": ["", "", "b", "bc", "bc"],  # never the beginning of a stop string
    }


@pytest.mark.parametrize("budget", [8192, 7])
@pytest.mark.parametrize("num_kv_blocks", [100, 9])
def test_no_schedule_changes_prompt_logprobs(budget, num_kv_blocks, tmp_path_factory):
    path, reference = checkpoint("qwen3", tmp_path_factory)
    prompts = [random_prompts([50])[0], [7], random_prompts([33])[0], random_prompts([50])[0]]
    params = SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=3, logprobs=1)
    settings = {"block_size": 16, "num_kv_blocks": num_kv_blocks, "max_num_batched_tokens": budget}
    with LLM(str(path), **settings) as llm:
        llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)  # a warm prefix cache
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert (llm.metrics()["num_preemptions"] > 0) == (num_kv_blocks == 9)
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        with torch.no_grad():
            ids = torch.tensor([prompt + completion.token_ids])
            expected = reference(ids).logits[0].log_softmax(-1)
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        entries = [*output.prompt_logprobs[1:], *completion.logprobs]
        targets = [*prompt[1:], *completion.token_ids]
        for position, (entry, target) in enumerate(zip(entries, targets, strict=True)):
            row = expected[position]
            for token_id, logprob in entry.items():
                assert logprob.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert entry[target].rank == int((row > row[target]).sum()) + 1
            assert 3 + (position >= len(prompt) - 1) * -2 <= len(entry) <= 4
        drawn = [row[i].logprob for row, i in zip(completion.logprobs, completion.token_ids, strict=True)]
        assert completion.cumulative_logprob == pytest.approx(sum(drawn))


@pytest.mark.parametrize(
    ("settings", "asked", "limit"),
    [({}, 20, 20), *(({"max_logprobs": n}, n, limit) for n, limit in [(3, 3), (0, 0), (-1, 128)])],
)
def test_logprobs_are_limited_by_max_logprobs_and_minus_one_means_all(settings, asked, limit, qwen3):
    with LLM(qwen3, num_kv_blocks=10, **settings) as llm:
        for name in ("logprobs", "prompt_logprobs"):
            params = SamplingParams(temperature=0, max_tokens=1, **{name: asked})
            (output,) = llm.generate([1, 2, 3], params, use_tqdm=False)
            told = output.outputs[0].logprobs or output.prompt_logprobs
            assert len(told[-1]) in (limit, limit + 1)  # one more if the token is none of the likeliest
            for num in {limit + 1, -1} - {asked}:
                message = f"{name}: .* {num}, .* greater than max allowed: {limit};"
                with pytest.raises(ValueError, match=message):
                    llm.generate([1, 2, 3], SamplingParams(**{name: num}), use_tqdm=False)


BEFORE = ["", " ", "\n", "\t", *string.punctuation, "\n\n", ".\n", " (", ' "', ") ", "**"]
SPACED = "wonderful orange forbidden"  # words that training saw after a space only
WORDS = f"{SPACED} the answer water self value return".split()
LLAMA, EVERY_MARK = normalizers.Replace(" ", "\u2581"), Regex(r"[^\u2581\w]|\n|_")


def corpus():
    rng = random.Random(0)
    for _ in range(600):
        words = rng.choices(WORDS, k=9)
        yield "".join((" " if word in SPACED else rng.choice(BEFORE[1:])) + word for word in words)


@cache
def trained_tokenizer(kind):
    """Return a tokenizer that was trained on `corpus`, of one of the kinds that models have."""
    pre, settings = pre_tokenizers, {"show_progress": False, "special_tokens": ["<unk>"]}
    if kind in gguf_tokenizer.SPLITS:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = gguf_tokenizer.pre_tokenizer(kind)
        trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=pre.ByteLevel.alphabet(), **settings)
        backend.train_from_iterator(corpus(), trainer)
    elif kind == "wordpiece":
        backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
        backend.normalizer = normalizers.BertNormalizer()
        backend.pre_tokenizer = pre.BertPreTokenizer()
        backend.train_from_iterator(corpus(), trainers.WordPieceTrainer(vocab_size=90, **settings))
    else:  # SentencePiece's, which does not merge marks with letters
        used = pre.Metaspace(prepend_scheme="never" if kind == "llama" else kind.removeprefix("unigram "))
        model, trainer = models.BPE(unk_token="<unk>"), trainers.BpeTrainer(vocab_size=110, **settings)
        if kind.startswith("unigram"):
            model = models.Unigram()
            trainer = trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", **settings)
        backend = Tokenizer(model)
        backend.pre_tokenizer = pre.Sequence([used, pre.Split(EVERY_MARK, "isolated")])
        backend.train_from_iterator(corpus(), trainer)
        backend.pre_tokenizer = used
        if kind == "llama":  # the tokenizer.json of Llama 2 prepends a space to the text and splits nothing
            backend.pre_tokenizer = pre.Sequence([])
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), LLAMA])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def joined(ids):
    """Return a text that contains another one if these token ids contain those of the other."""
    return f" {' '.join(map(str, ids))} "


SENTENCEPIECE = ["llama", "first", "always", "never", "unigram always", "unigram first"]


@pytest.mark.parametrize("kind", ["gpt-2", "llama-bpe", "qwen2", "gpt-4o", *SENTENCEPIECE, "wordpiece"])
def test_every_spelling_of_a_bad_word_is_banned_and_no_other_text(kind):
    tokenizer = trained_tokenizer(kind)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    lengths = {(len(encode(word)), len(encode(f"a {word}")) - len(encode("a"))) for word in SPACED.split()}
    assert kind == "wordpiece" or kind in SENTENCEPIECE or any(bare > spaced for bare, spaced in lengths)
    encoded = [(text, joined(encode(text))) for text in corpus()]
    spellings_of_all = set()
    for word in WORDS:
        spellings_of_all |= {*(spellings := bad_word_ids([word], tokenizer, len(tokenizer)))}
        assert len(set(spellings)) == len(spellings)
        assert bad_word_ids([f" {word}"], tokenizer, len(tokenizer)) == spellings
        texts = []
        for before in BEFORE:
            within = before and before != "'"  # after a letter, this may be the mark of a contraction
            starts = ("", "\n", "the answer", "orange") if within else ("",)
            texts += [f"{start}{before}{word}" for start in starts]
        for text, ids in zip(texts, tokenizer(texts, add_special_tokens=False).input_ids, strict=True):
            assert any(ids[-len(one) :] == [*one] for one in spellings), text
        for text, ids in encoded:
            if word not in text:
                assert not any(joined(one) in ids for one in spellings), (word, text)
    assert {*bad_word_ids(WORDS, tokenizer, len(tokenizer))} == spellings_of_all


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_invalid_logits_end_only_their_request(async_scheduling, tmp_path, caplog):
    model = str(chain_checkpoint(tmp_path, "abcdef"))
    settings = {"num_kv_blocks": 10, "max_num_batched_tokens": 8, "long_prefill_token_threshold": 3}
    with LLM(model, **settings, async_scheduling=async_scheduling) as llm:
        compute_logits = llm.llm_engine.runner.model.compute_logits

        def broken_after_x(hidden):
            logits = compute_logits(hidden)
            logits[hidden[:, ord("x")] > 1, ord("z")] = torch.nan  # the hidden state spells the last token
            return logits

        llm.llm_engine.runner.model.compute_logits = broken_after_x
        for temperature in (0.0, 1e-4):
            params = SamplingParams(temperature=temperature, max_tokens=4, logprobs=1)
            good, bad = llm.generate(["a", "x"], params, use_tqdm=False)
            assert good.outputs[0].text == "bcde"
            assert (bad.outputs[0].finish_reason, bad.outputs[0].token_ids) == ("error", [])
            assert bad.outputs[0].stop_reason.startswith("no token could be sampled: the logits are NaN")
        assert caplog.text.count(f"failed: {bad.outputs[0].stop_reason}") == 2
        # The logits that the prompt's log-probabilities come from, in an early and in the last chunk.
        for prompt, n, max_tokens in itertools.product(("xaaaaa", "aaaaxa"), (1, 2), (1, 4)):
            params = SamplingParams(prompt_logprobs=0, temperature=0, n=n, max_tokens=max_tokens)
            good, bad = llm.generate(["aaaaa", prompt], params, use_tqdm=False)
            found = [next(iter(entry.values())).logprob for entry in bad.prompt_logprobs[1:]]
            assert [math.isnan(one) for one in found].index(True) == prompt.index("x")
            assert len(good.prompt_logprobs) == 5
            assert {c.text for c in good.outputs} == {"bcde"[:max_tokens]}
            reason = "a log-probability is NaN: the logits are NaN or infinite"
            assert (bad.outputs[0].finish_reason, bad.outputs[0].stop_reason) == ("error", reason)
            assert all(c.finish_reason == "length" for c in bad.outputs[1:])
        masked = SamplingParams(allowed_token_ids=[97], temperature=0, max_tokens=9, logprobs=0)
        completion = llm.generate(["x"], masked, use_tqdm=False)[0].outputs[0]
        assert (completion.finish_reason, completion.stop_reason) == ("error", reason)
        assert llm.metrics()["num_free_blocks"] == 10


def test_request_finishes_with_its_last_sample(tmp_path):
    logits = torch.zeros(257, 257)
    logits[:, 256] = 3.0  # ends soon, at different times
    with LLM(str(table_checkpoint(tmp_path, logits)), num_kv_blocks=20) as llm:
        llm.add_request("x", "a", SamplingParams(n=4, seed=1, max_tokens=200))
        ended = []
        while llm.has_unfinished_requests():
            for output in llm.step():
                ended.append(sum(c.finish_reason is not None for c in output.outputs))
                assert output.finished == (ended[-1] == 4)
                assert (output.metrics.finished_time is None) == (not output.finished)
    assert len(set(ended)) > 2


def test_logprobs_decode_each_token_once_per_engine(monkeypatch):
    params = SamplingParams(max_tokens=20, logprobs=20, prompt_logprobs=5, seed=1)
    decoded = Counter()
    spelling = PreTrainedTokenizerFast.convert_ids_to_tokens

    def counting(self, token_id):
        decoded[token_id] += 1
        return spelling(self, token_id)

    with LLM(DEMO, num_kv_blocks=200, logprobs_mode="raw_logprobs") as llm:
        monkeypatch.setattr(PreTrainedTokenizerFast, "convert_ids_to_tokens", counting)
        outputs = [llm.generate(["Hello", "What is 2 + 2?"] * 4, params, use_tqdm=False) for _ in range(2)]
        tables = [one.outputs[0].logprobs + one.prompt_logprobs[1:] for one in outputs[0] + outputs[1]]
        entries = [entry for table in tables for entry in table]
        assert sum(map(len, entries)) > 20 * len(decoded) / 2
        assert set(decoded.values()) == {1}
        tokenizer = llm.get_tokenizer()
        for entry in entries:
            for token_id, logprob in entry.items():
                if "\ufffd" not in (text := tokenizer.decode([token_id])):
                    assert logprob.decoded_token.removeprefix("\ufffd") == text


def test_the_texts_of_a_request_s_tokens_joined_are_the_text(tmp_path):
    path = chain_checkpoint(tmp_path, "ab日é🙂")
    params = SamplingParams(max_tokens=9, logprobs=1, prompt_logprobs=1, temperature=0)
    prompt = [0xE6, *"日".encode()[1:], ord("a")]
    with LLM(path, num_kv_blocks=4, max_num_batched_tokens=2, max_num_seqs=1) as llm:
        output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
    said = output.outputs[0]
    texts = [entry[one].decoded_token for one, entry in zip(said.token_ids, said.logprobs, strict=True)]
    assert "".join(texts) == said.text
    told = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    assert [entry[one].decoded_token for one, entry in told] == ["", "日", "a"]


def test_token_ids_must_be_integers_in_the_vocabulary():
    class Digit(IntEnum):
        SEVEN = 7

    for right in ([0, 9], (0, 9), range(3), [np.int64(9), 0], [Digit.SEVEN, np.uint8(3)], []):
        checked = check_prompt_ids(right, 10)
        assert checked == list(right)
        assert {type(one) for one in checked} <= {int}
    for wrong in ([1, True], [1, 2.0], [1, "2"], [1, None], [1, [2]], [np.True_]):
        with pytest.raises(TypeError, match="integer token ids only, got"):
            check_prompt_ids(wrong, 10)
    for wrong, found in (([1, 10], 10), ([-1, 1], -1), ([1, 2**70], 2**70), ([np.int32(-5)], -5)):
        with pytest.raises(ValueError, match=rf"token ids in \[0, 10\), got {found}"):
            check_prompt_ids(wrong, 10)


def tokenizer_of(normalizer=None, pre_tokenizer=None, model=None):
    """Return another model's tokenizer, or one of bytes in which "ab" is a token too."""
    alphabet = sorted(ByteLevel.alphabet())
    bytewise = models.BPE({word: i for i, word in enumerate([*alphabet, "ab"])}, [("a", "b")])
    backend = Tokenizer(bytewise if model is None else model)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False) if pre_tokenizer is None else pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZERS = {
    "bytes": tokenizer_of(),
    "composed": tokenizer_of(normalizers.NFC()),
    "drops accents": tokenizer_of(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "shortens": tokenizer_of(normalizers.Replace(Regex(" +"), " ")),
    "splits at spaces": tokenizer_of(None, pre_tokenizers.WhitespaceSplit()),
    "words": tokenizer_of(
        None, pre_tokenizers.Whitespace(), models.WordLevel({"ab": 0, "?": 1}, unk_token="?")
    ),
}


def checker_of(tokenizer, max_model_len):
    return RequestChecker(SimpleNamespace(tokenizer=tokenizer), None, max_model_len, None)


@given(
    st.sampled_from(sorted(TOKENIZERS)),
    st.text(st.sampled_from("ab e\u0301\xe9\u65e5"), min_size=1, max_size=6),
    st.integers(100, 3000),
    st.integers(20, 600),
)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_prompt_that_fits_is_never_rejected(which, unit, num, max_model_len):
    tokenizer, text = TOKENIZERS[which], unit * num
    token_ids = tokenizer(text).input_ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanoengine.requests.LONG_TEXT", 512)
        patch.setattr("nanoengine.requests.PIECE", 128)
        try:
            assert checker_of(tokenizer, max_model_len).encode(text) == token_ids
        except ValueError:
            assert len(token_ids) > max_model_len - 1


@pytest.fixture
def tokenized(monkeypatch):
    """Return a list that grows by each text that is tokenized."""
    texts, encode = [], PreTrainedTokenizerFast._encode_plus
    noted = lambda self, text, **named: texts.append(text) or encode(self, text, **named)  # noqa: E731
    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", noted)
    return texts


@pytest.mark.parametrize("beginning", ["", " " * 2**18])
def test_prompt_of_megabytes_is_rejected_before_it_is_tokenized(beginning, demo, tokenized):
    text = beginning + "a b c " * 2**20
    for ask in (demo.generate, lambda text: demo.chat([{"role": "user", "content": text}])):
        tokenized.clear()
        with pytest.raises(ValueError, match=r"prompt has \d+ characters, which is too many tokens for"):
            ask(text)
        assert sum(map(len, tokenized)) < len(beginning) + 2**16


def test_text_of_usual_length_is_tokenized_once(tokenized):
    tokenizer, text = TOKENIZERS["bytes"], "ab" * 2**16
    assert len(checker_of(tokenizer, 2**15).encode(text)) == 2**16
    assert tokenized == [text]


SLOWER = [pytest.param(x, marks=pytest.mark.slow) for x in ("qwen2", *SENTENCEPIECE) if x != "first"]


@pytest.mark.parametrize("kind", ["gpt-2", "first", *SLOWER])
def test_a_truncated_prompt_is_cut_before_it_is_tokenized_with_the_same_tokens(kind, monkeypatch):
    tokenizer, lengths = trained_tokenizer(kind), []
    text = " ".join(itertools.islice(itertools.cycle(corpus()), 7_000))
    whole = tokenizer(text).input_ids
    noted = lambda text, **more: lengths.append(len(text)) or tokenizer(text, **more)  # noqa: E731
    checker = checker_of(noted, 1000)
    for num_kept in (1, 10, 999):
        lengths.clear()
        found = checker.encode(text, is_cut=True, num_kept=num_kept)
        assert len(found) == num_kept + 1
        assert found == whole[-num_kept - 1 :]
        assert sum(lengths) < len(text) / 2
        end = text[-1000:]
        assert checker.encode(end, is_cut=True, num_kept=num_kept) == tokenizer(end).input_ids
    assert checker.encode(text, is_cut=True) == whole


@pytest.fixture(scope="module")
def demo():
    with LLM(DEMO, num_kv_blocks=20) as llm:
        yield llm


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_outputs_do_not_repeat_the_prompt_s_logprobs(kind, demo):
    params = SamplingParams(max_tokens=5, ignore_eos=True, prompt_logprobs=1, output_kind=kind)
    outputs: list = []
    demo.llm_engine.add_request("r", "Hello", params)
    while demo.llm_engine.has_unfinished_requests():
        outputs += demo.llm_engine.step()
    first, *others = [output.prompt_logprobs for output in outputs]
    if kind is RequestOutputKind.DELTA:
        assert others == [None] * len(others)
    else:
        assert all(one is first for one in others)
    merged = outputs[0]
    for output in outputs[1:]:
        merged = merged.merged_with(output)
    assert merged.prompt_logprobs == first


def test_an_engine_says_why_it_is_not_pickled(demo):
    for one in (demo, demo.llm_engine, AsyncLLM.__new__(AsyncLLM)):
        with pytest.raises(TypeError, match=f"^{type(one).__name__} .*make one in the other process"):
            pickle.dumps(one)
