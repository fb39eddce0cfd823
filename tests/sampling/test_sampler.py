"""SamplingParams' validation, and the sampler against distributions worked out by hand."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanoengine import LLM
from nanoengine.backends.cpu.kernels import Kernels
from nanoengine.backends.device import Download
from nanoengine.sampling.drawing import FILTERED_ROWS, draw_rows, filter_logits, process_logits
from nanoengine.sampling.penalties import edit_logits
from nanoengine.sampling.sampler import RowSettings, SamplingRow, sample_rows
from nanoengine.sampling_params import SamplingParams
from tests.helpers import BAD_FIELDS, sample, table_checkpoint

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS)
def test_an_error_about_a_bad_field_names_it_and_its_value(name, value):
    with pytest.raises((ValueError, TypeError)) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)
    shown = value if not isinstance(value, (list, dict)) else None
    assert shown is None or repr(shown) in str(caught.value)


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "forced_token_ids", "stop_token_ids"])
def test_token_ids_outside_the_vocabulary_are_refused(name):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: {100: 1.0} if name == "logit_bias" else [5, 100]}).check_vocabulary(100)


def row(params=None, token_ids=(0,), num_prompt_tokens=1, seed=0, stop_ids=(), **fields):
    params = params or SamplingParams(**fields)
    token_ids = list(token_ids)
    return SamplingRow(params, seed, len(token_ids), token_ids, num_prompt_tokens, frozenset(stop_ids))


def metadata_of(rows):
    return RowSettings(rows).metadata([row.position for row in rows])


LOGITS = torch.tensor([0.5, 2.0, 1.0, -1.0, 1.5, 0.0])


def counts(num_samples=8000, logits=LOGITS, **fields):
    """Return how often each token is sampled, at many positions and with many seeds."""
    params = SamplingParams(**fields)
    rows = [row(params, token_ids=range(i + 1), seed=i % 20 * 7919 + 1) for i in range(400)]
    drawn: Counter[int] = Counter()
    for first in range(0, num_samples, len(rows)):
        for r in rows:
            r.seed += first
        drawn.update(sample(logits.expand(len(rows), -1), rows)[0])
    return drawn


def chi_square_fits(drawn, probs):
    total = sum(drawn.values())
    assert all(probs[token] > 0 for token in drawn), f"a token of probability 0 was sampled: {drawn}"
    statistic = sum((drawn[i] - total * p) ** 2 / (total * p) for i, p in enumerate(probs) if p > 0)
    degrees = sum(p > 0 for p in probs) - 1
    # Three standard deviations above the mean of the chi-square distribution; the samples are seeded.
    return statistic <= degrees + 3 * math.sqrt(2 * max(1, degrees))


def softmax(values):
    weights = [math.exp(v) for v in values]
    return [w / sum(weights) for w in weights]


L = LOGITS.tolist()
P = softmax(L)  # by falling probability: tokens 1, 4, 2, 0, 5, 3


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, P),
        ({"temperature": 0.5}, softmax([2 * v for v in L])),
        ({"temperature": 3.0}, softmax([v / 3 for v in L])),
        ({"top_k": 2, "top_p": 0.7}, softmax([v if i in (1, 4) else -INF for i, v in enumerate(L)])),
        ({"allowed_token_ids": [0, 3]}, softmax([v if i in (0, 3) else -INF for i, v in enumerate(L)])),
    ],
)
def test_samples_follow_the_distribution_worked_out_by_hand(fields, expected):
    assert chi_square_fits(counts(**fields), expected)


def test_the_distribution_test_can_fail():
    assert not chi_square_fits(counts(), softmax([1.1 * v for v in L]))


@pytest.mark.parametrize("vocab_size", [1000, 1024, 1187 * 128])  # padded, 512 and 128 to a chunk
def test_a_distribution_over_many_chunks_of_the_vocabulary_is_followed(vocab_size):
    logits = torch.full((vocab_size,), -INF)
    logits[[0, 31, 32, 500, 999]] = torch.tensor([0.1, 1.0, 0.5, 0.7, 0.3])
    drawn = counts(8000 if vocab_size < 2000 else 400, logits=logits)
    assert chi_square_fits(drawn, logits.double().softmax(0).tolist())


def test_a_row_samples_the_same_alone_and_in_any_batch():
    choices = [
        {"logit_bias": {3: 2.0, 7: -1.0}, "logprobs": 2},
        {"repetition_penalty": 1.7, "logprobs": 0},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"allowed_token_ids": [1, 2, 30, 2], "logprobs": -1},
        {"min_tokens": 5, "logprobs": 2},
        {"repetition_penalty": 0.8, "logit_bias": {1: 1.0}, "min_tokens": 3, "presence_penalty": -1.0},
        *({}, {"temperature": 0}, {"top_k": 3}, {"top_k": 20, "top_p": 0.5, "min_p": 0.1}, {"top_p": 0.9}),
        *({"min_p": 0.2}, {"top_k": 2000}, {"temperature": 0.01, "top_k": 1}, {"bad_words": ["x"]}),
    ]
    rows = []
    for i, fields in enumerate(choices * 3):
        token_ids = [(i * j) % 50 for j in range(1, 9)]
        built = row(SamplingParams(**fields), token_ids, 5, seed=i, stop_ids=(4, 9))
        rows.append(replace(built, bad_words=((token_ids[-1], 6), (8,)) if i % 4 == 0 else ()))
    logits = torch.randn(len(rows), 3000).bfloat16()  # with many equal logits
    token_ids, reports = sample(logits, rows)
    for i, one in enumerate(rows):
        (alone,), (report,) = sample(logits[i : i + 1], [one])
        assert token_ids[i] == alone
        assert (reports[i] is None) == (report is None)
        for token_id, entry in (reports[i] or {}).items():
            assert entry.rank == report[token_id].rank
            assert entry.logprob == pytest.approx(report[token_id].logprob, abs=1e-6)


EXTREMES: list[dict] = [{"temperature": 1e30}, {"temperature": 1e30, "top_k": 3, "top_p": 0.9}]
EXTREMES += [{"logit_bias": {1: 1e30, 4: -1e30}}, {"repetition_penalty": 1e-4}]
EXTREMES += [{"repetition_penalty": 1e4, "temperature": 0}]


@pytest.mark.parametrize("fields", EXTREMES)
def test_extreme_values_never_draw_a_token_that_is_not_allowed(fields):
    params = SamplingParams(allowed_token_ids=[3, 5], **fields)
    drawn, _ = sample(LOGITS.repeat(50, 1), [row(params, [3, 1], seed=i) for i in range(50)])
    assert {*drawn} <= {3, 5}


def test_a_row_with_top_k_alone_keeps_unlikely_tokens_beside_a_row_with_top_p():
    rows = [row(SamplingParams(top_k=1000)), row(SamplingParams(top_k=1000, top_p=0.9))]
    for seed in range(10):  # the sum of some rows' probabilities is rounded to 1 before the last token
        logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(seed)) * 3
        scaled = (logits - logits.max()).repeat(2, 1)
        filter_logits(scaled, metadata_of(rows))
        assert scaled[0].isfinite().all()


def test_equal_logits_share_their_rank():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    params = SamplingParams(temperature=0, logprobs=0, allowed_token_ids=[2])
    assert sample(logits, [row(params)])[1][0][2].rank == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_row_with_nan_or_inf_samples_nothing_and_does_not_affect_others(bad, temperature):
    logits = LOGITS.expand(2, -1).clone()
    logits[0, 2] = bad
    rows = [row(temperature=temperature, logprobs=1), row(temperature=0, logprobs=1)]
    token_ids, logprobs = sample(logits, rows)
    assert token_ids == [None, 1]
    assert logprobs[0] is None
    assert 1 in logprobs[1]


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53, 0.5])
def test_random_numbers_at_the_ends_of_their_interval_draw_a_possible_token(u, monkeypatch):
    monkeypatch.setattr("nanoengine.sampling.sampler.uniform", lambda s, p: np.full(len(s), u))
    logits = torch.full((1, 1000), -INF)
    logits[0, [3, 700]] = 0.0
    assert sample(logits, [row()])[0][0] in (3, 700)
    # A chunk's weights and its tokens' are added in two ways, so a target may exceed the sum of the latter.
    assert max(sample(torch.randn(99, 1000), [row()] * 99)[0]) < 1000


def greedy_after(**fields):
    return sample(LOGITS.unsqueeze(0), [row(temperature=0, **fields)])


def test_min_tokens_bans_every_stop_id_until_it_is_reached():
    options = {"stop_ids": (1, 4), "min_tokens": 2}
    assert greedy_after(token_ids=[0], **options)[0] == [2]
    assert greedy_after(token_ids=[0, 5], **options)[0] == [2]
    assert greedy_after(token_ids=[0, 5, 5], **options)[0] == [1]


def test_logprobs_hold_the_sampled_token_and_the_most_probable_ones_from_the_raw_logits():
    result = greedy_after(logprobs=2, logit_bias={3: 100.0})
    assert result[0] == [3]
    entry = result[1][0]
    assert set(entry) == {3, 1, 4}
    assert [entry[token].rank for token in (3, 1, 4)] == [6, 1, 2]
    for token, logprob in entry.items():
        assert logprob.logprob == pytest.approx(math.log(P[token]), abs=1e-5)
    assert set(greedy_after(logprobs=0)[1][0]) == {1}


class Work(TorchDispatchMode):
    """Counts operations, the entries that they read or write, and notes the shapes that are sorted."""

    def __init__(self):
        super().__init__()
        self.entries, self.calls, self.sorted = 0, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, name = func(*args, **(kwargs or {})), func._schema.name
        self.calls += "view" not in name
        self.sorted += [args[0].shape] if "sort" in name else []
        if name.startswith("aten::index_fill"):
            self.entries += args[2].numel() * args[0].numel() // args[0].shape[args[1]]
        elif "view" not in name:
            tensors = [one for one in tree_leaves((args[1:], result)) if isinstance(one, torch.Tensor)]
            self.entries += max((one.numel() for one in tensors), default=0)
        return result


V = 4096
EVERY = list(range(V))
LONG_EDITS: dict[str, dict[str, Any]] = {
    "allowed": {"allowed_token_ids": EVERY},
    "allowed twice": {"allowed_token_ids": EVERY + EVERY},
    "biases": {"logit_bias": dict.fromkeys(EVERY, 1.0)},
    "stop ids": {"min_tokens": 9000, "max_tokens": 9000, "stop_ids": EVERY[1:]},
    "bad words": {"bad_words": ["x"], "found": tuple((i,) for i in EVERY[1:])},
    "bad words of two tokens": {"bad_words": ["x"], "found": tuple((7, i) for i in EVERY[1:])},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.5, "token_ids": EVERY},
    "penalties of a repeated token": {"presence_penalty": 0.5, "token_ids": [7] * V},
}
LONG_EDITS["all"] = {name: value for one in LONG_EDITS.values() for name, value in one.items()}


@pytest.mark.parametrize("name", LONG_EDITS)
def test_a_step_s_work_for_edits_is_linear_in_the_logits_and_the_edited_entries(name):
    edits = {"token_ids": [3, 7], "found": ()} | LONG_EDITS[name]
    found = edits.pop("found")
    rows = [replace(row(**edits), bad_words=found) for _ in range(4)]
    logits = torch.randn(len(rows), V)
    with Work() as work:
        edit_logits(logits, rows, RowSettings(rows))
    assert logits.numel() // 4 < work.entries < 100 * logits.numel()  # entries x vocabulary are 4096 * numel


def test_the_count_of_work_sees_rows_that_are_filled_once_per_entry():
    logits = torch.randn(4, V)
    with Work() as work:
        logits.index_fill_(0, torch.arange(4).repeat_interleave(V), -INF)
    assert work.entries >= V * logits.numel()


def test_arrays_of_a_request_are_made_once_and_shared_by_its_samples_in_every_batch():
    edits = {"allowed_token_ids": [1, 2, 2, 8], "logit_bias": {1: 2.0, 3: 5.0}, "min_tokens": 9}
    first = replace(row(SamplingParams(**edits), stop_ids=(4, 9)), bad_words=((8,), (0, 2), (3, 1)))
    rows = [first, replace(first, seed=1), row(logit_bias={5: 1.0})]
    logits = torch.randn(3, 10)
    before = logits.clone()
    edit_logits(before, rows, RowSettings(rows))
    for one in rows:
        one.params.logit_bias = one.params.allowed_token_ids = object()  # which cannot be read again
    for batch in [0, 1, 2], [1, 0], [2], [2, 1]:
        chosen, after = [rows[i] for i in batch], logits[batch].clone()
        settings = RowSettings(chosen)
        for _ in range(2):
            after[:] = logits[batch]
            edit_logits(after, chosen, settings)
            assert torch.equal(after, before[batch])


def filtered_by_sorting(scaled, params):
    """Filter by definition: sort the whole row, stably, and keep what the filters keep."""
    kept = torch.full_like(scaled, -INF)
    for row, p in enumerate(params):
        values, order = scaled[row].sort(descending=True, stable=True)
        rank = torch.arange(len(values))
        values = values.masked_fill((rank >= p.top_k) & (p.top_k > 0), -INF)
        values = values.masked_fill(values.exp() < np.float32(p.min_p), -INF)
        probs = values.softmax(-1)
        if p.top_p < 1:
            values = values.masked_fill(probs.cumsum(-1) - probs >= np.float32(p.top_p), -INF)
        kept[row, order] = values
    return kept


@pytest.mark.parametrize("vocab_size", [5, 130, 3000])
@pytest.mark.parametrize("step", [0.0, 0.5, 1e-3])  # the coarser, the more logits are equal
def test_filters_keep_what_a_stable_sort_keeps_in_any_batch(vocab_size, step):
    generator = torch.Generator().manual_seed(0)
    mixes = itertools.product((-1, 1, 2, 50, 1000), (1.0, 0.9, 0.5, 0.3), ((0, 1.0), (0.2, 1.0), (0.2, 0.0)))
    params = [SamplingParams(top_k=k, top_p=p, min_p=m, temperature=t) for k, p, (m, t) in mixes]
    logits = torch.randn(len(params), vocab_size, generator=generator) * 3
    if step:
        logits = (logits / step).round() * step
    scaled = logits - logits.amax(-1, keepdim=True)
    scaled[::2, 0], scaled[::2, -1] = -0.0, 0.0  # are equal: one of two reaches a top_p of 0.5 exactly
    expected = filtered_by_sorting(scaled, params)
    greedy_rows = [i for i, p in enumerate(params) if p.temperature == 0]
    expected[greedy_rows] = scaled[greedy_rows]  # nothing is sampled from them
    together, rows = scaled.clone(), [row(p) for p in params]
    filter_logits(together, metadata_of(rows))
    assert torch.equal(together, expected)
    for i in range(len(rows)):
        alone = scaled[i : i + 1].clone()
        filter_logits(alone, metadata_of(rows[i : i + 1]))
        assert torch.equal(alone[0], expected[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 5, 255, 257, 3000])
def test_the_kernel_samples_the_same_tokens_as_pytorch_in_any_batch(vocab_size, dtype):
    """With 16 bits, many logits are equal."""
    generator = torch.Generator().manual_seed(0)
    filters = enumerate(itertools.product((-1, 1, 40, 50_000), (1.0, 0.9, 0.2, 1e-46), (0.0, 0.1, 1.0)))
    mixes = itertools.product(filters, (0.0, 0.6, 3.0, 1e-38))
    rows = [row(top_k=k, top_p=p, min_p=m, temperature=t, seed=i) for (i, (k, p, m)), t in mixes]
    logits = (torch.randn(len(rows), vocab_size, generator=generator) * 3).to(dtype)
    logits[::3, ::2] = -INF
    logits[:, -1] = 0.5
    metadata = metadata_of(rows)
    tokens, largest = Kernels().sample(logits, metadata)
    expected, expected_largest = draw_rows(logits, metadata)
    assert tokens.tolist() == expected.tolist()
    assert torch.equal(largest, expected_largest.float())
    cold = np.flatnonzero(metadata.temperature < 1e-30)  # greedy, and no logit overflows
    assert torch.equal(logits[cold, tokens[cold]].float(), largest[cold])
    for i in range(0, len(rows), 7):
        alone = Kernels().sample(logits[i : i + 1], type(metadata)._make(x[i : i + 1] for x in metadata))
        assert alone[0].item() == tokens[i]


def test_the_kernel_finds_top_k_anywhere_in_the_vocabulary():
    """It looks among parts of the vocabulary for how far the last of them can be."""
    logits = torch.zeros(1, 640)
    logits[0, ::64] = torch.linspace(5, 6, 10)
    rows = [row(top_k=10, seed=seed) for seed in range(200)]
    assert set(sample(logits.expand(200, -1), rows)[0]) == set(range(0, 640, 64))


def test_a_vocabulary_is_sorted_only_for_top_p_without_top_k():
    fields = [{"top_k": 20, "top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3}, {"temperature": 0, "top_p": 0.5}, {}]
    for chosen, sorted_rows in ((fields, []), ([{"top_k": 2}, {"top_p": 0.5}, {}], [1])):
        with Work() as work:
            draw_rows(torch.randn(len(chosen), 2000), metadata_of([row(**one) for one in chosen]))
        # The few that a top_k selects may be sorted.
        assert [len_rows for len_rows, width in work.sorted if width == 2000] == sorted_rows


class LiveBytes(TorchDispatchMode):
    """Records the peak of the bytes that tensors made under it take."""

    def __init__(self):
        super().__init__()
        self.made, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.made = {key: made for key, made in self.made.items() if not made[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.made.values()))
        return out


@pytest.mark.slow
def test_no_mix_of_parameters_takes_more_memory_than_the_trial_pass(monkeypatch):
    """Filters run 64 rows at a time, as on a GPU: 256 rows of 152k logits take half a GiB, counts 78 MB."""
    num_rows, vocab_size = 256, 4096
    monkeypatch.setattr("nanoengine.sampling.drawing.CACHED_LOGITS", FILTERED_ROWS * vocab_size)
    logits = torch.randn(num_rows, vocab_size).bfloat16()

    def peak(processed=False, **settings):
        rows = [SamplingRow(SamplingParams(**settings), 1, 2, [1, 2], 1)] * num_rows
        with LiveBytes() as mode:
            view = logits[:]  # made here, so that the logits are counted
            sample_rows(view, rows, RowSettings(rows), Download, draw=draw_rows, reports_processed=processed)
        return mode.peak

    choices = {"top_k": (0, 20, vocab_size), "top_p": (1, 0.5), "min_p": (0, 0.1)}
    choices |= {"repetition_penalty": (1, 1.1), "logprobs": (None, 20)}
    costly = {"top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1, "logprobs": 1}
    trial, peak_processed = peak(**costly), peak(processed=True, **costly)
    greedy = {"temperature": 0, "repetition_penalty": 1.1, "logprobs": 20}
    mixes = [dict(zip(choices, x, strict=True)) for x in itertools.product(*choices.values())]
    for settings in [greedy, *mixes]:
        assert peak(**settings) <= 1.02 * trial, settings  # what is not as wide as the vocabulary
        if settings["logprobs"]:
            assert peak(processed=True, **settings) <= 1.02 * peak_processed, settings
    monkeypatch.setattr("nanoengine.sampling.drawing.CACHED_LOGITS", 1 << 30)  # as on a GPU
    assert peak(**costly) <= 1.02 * trial
    trial, peak_processed = (x / (num_rows * vocab_size) - 2 for x in (trial, peak_processed))  # 2: of counts
    assert trial * 256 * 151_936 <= 1 << 29
    assert peak_processed * 256 * 151_936 <= 3 << 28


@pytest.mark.parametrize(
    ("fields", "kernels", "most_passes", "most_calls"),
    [
        # The largest of rows and of chunks, and 20 chunks of each row
        ({"top_k": 20, "top_p": 0.95}, (), 4, 100),
        ({}, (lambda chunks, *_: torch.zeros(len(chunks), dtype=torch.int64),), 1.2, 15),
    ],
)
def test_few_passes_read_all_logits(fields, kernels, most_passes, most_calls, monkeypatch):
    monkeypatch.setattr("nanoengine.sampling.drawing.CACHED_LOGITS", 1 << 30)  # all rows at once, as on a GPU
    logits = torch.randn(8, 1 << 17).bfloat16()
    with Work() as work:
        draw_rows(logits, metadata_of([row(temperature=0.6, **fields)] * 8), *kernels)
    assert work.entries < most_passes * logits.numel()
    assert work.calls < most_calls


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Return a model whose next-token logits are those of a table, and the table."""
    logits = torch.randn(260, 260, generator=torch.Generator().manual_seed(0))
    return str(table_checkpoint(tmp_path_factory.mktemp("table"), logits, ("a", "b", "c"))), logits


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_processed_logprobs_are_those_that_tokens_are_sampled_from(enforce_eager, table):
    path, logits = table
    prompt = [0, 1, 2, 65]  # with logits of both signs, which a repetition penalty scales in opposite ways
    params = [
        {"temperature": 0.0},
        {"temperature": 0.5, "repetition_penalty": 2.0},
        {"temperature": 2.0, "top_k": 3},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 0.7, "top_p": 0.6, "repetition_penalty": 1.5, "presence_penalty": 1.0},
        {"temperature": 1.0, "allowed_token_ids": [5, 6, 7], "logit_bias": {6: 2.0}, "bad_words": ["\x07"]},
    ]
    settings = {"num_kv_blocks": 20, "max_logprobs": -1, "enforce_eager": enforce_eager}
    asked = [SamplingParams(**one, max_tokens=1, logprobs=-1, prompt_logprobs=1, seed=3) for one in params]
    with LLM(path, logprobs_mode="processed_logprobs", **settings) as llm:
        outputs = llm.generate([prompt] * len(asked), asked, use_tqdm=False)
    with LLM(path, **settings) as llm:
        raw = llm.generate([prompt] * len(asked), asked, use_tqdm=False)
    for one, of_model, output in zip(params, raw, outputs, strict=True):
        drawn, entry = output.outputs[0].token_ids[0], output.outputs[0].logprobs[0]
        assert [drawn] == of_model.outputs[0].token_ids  # the same token, reported otherwise
        assert output.prompt_logprobs == of_model.prompt_logprobs
        expected = processed(logits[65].clone(), prompt, SamplingParams(**one))
        found = torch.tensor([entry[token_id].logprob for token_id in range(260)])
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
        assert output.outputs[0].cumulative_logprob == entry[drawn].logprob > -INF
        assert entry[drawn].rank == 1 + int((expected > expected[drawn]).sum())


def test_a_sampled_token_is_not_excluded_and_a_row_may_have_none():
    logits, tokens = torch.tensor([[1.0, 3.0, 2.0]] * 2), torch.tensor([2, -1])
    found = process_logits(logits, metadata_of([row(top_k=1)] * 2), tokens)
    assert found[:, 1:].tolist() == [[0.0, -1.0], [0.0, -INF]]


def processed(logits, prompt, params):
    """Return processed log-probabilities, in vLLM's documented order and without nanoengine's code.

    There is no output yet whose tokens a presence penalty could count.
    """
    for token_id, bias in (params.logit_bias or {}).items():
        logits[token_id] += bias
    for token_id in prompt:
        logits[token_id] *= params.repetition_penalty ** (1 if logits[token_id] < 0 else -1)
    if params.allowed_token_ids:
        logits[[i for i in range(len(logits)) if i not in params.allowed_token_ids]] = -INF
    for word in params.bad_words or ():
        logits[ord(word)] = -INF
    scaled = logits / (params.temperature or 1.0)
    return filtered_by_sorting((scaled - scaled.max()).unsqueeze(0), [params])[0].log_softmax(-1)
