"""Checks the parts around the scheduler: attention, graphs, sampling, windows, verification, quantization."""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from docs.checks import expect, make_sequence, says


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    """Return normal random numbers, always the same ones."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expect_close(what: str, got: Tensor, expected: Tensor, atol: float = 1e-4) -> None:
    """Raise an AssertionError unless the tensors have one shape and are equal up to rounding."""
    expect(f"{what}, the shape", tuple(got.shape), tuple(expected.shape))
    apart = float((got.double() - expected.double()).abs().max())
    assert apart <= atol, f"{what}: differs by up to {apart:.2g}."


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of one token, q (H, D), to k and v (T, K, D)."""
    k, v = (x.repeat_interleave(len(q) // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("hd,thd->ht", q, k) / q.shape[1] ** 0.5
    return torch.einsum("ht,thd->hd", scores.softmax(1), v)


def part_of(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the part of an attention with scores (H, T) and values (H, T, D)."""
    weights = (scores - scores.amax(1, keepdim=True)).exp()
    return scores.amax(1), weights.sum(1), torch.einsum("ht,htd->hd", weights, v)


@says("10")
def merges_parts(student: Any) -> None:
    """Two parts are merged at the larger of their largest scores: the other part's sums shrink."""
    scores, v = 5 * random_tensor(2, 6), random_tensor(2, 6, 3, seed=1)
    for split in 1, 3, 5:
        parts = part_of(scores[:, :split], v[:, :split]), part_of(scores[:, split:], v[:, split:])
        for one, other in parts, parts[::-1]:
            for what, got, expected in zip(
                ("The largest score", "The sum of the weights", "The weighted sum"),
                student.merge(one, other),
                part_of(scores, v),
                strict=True,
            ):
                expect_close(what, got, expected)


@says("10")
def merges_large_scores(student: Any) -> None:
    """Scores of several hundreds do not overflow: only differences to the largest score are exponentiated."""
    v = random_tensor(1, 2, 3)
    scores = torch.tensor([[300.0, 301.0]])
    merged = student.merge(part_of(scores[:, :1], v[:, :1]), part_of(scores[:, 1:], v[:, 1:]))
    expect_close(
        "The result", merged[2] / merged[1].unsqueeze(1), (scores.softmax(1).unsqueeze(2) * v).sum(1)
    )


@says("10")
def attends_through_the_table(student: Any) -> None:
    """Position p is in block block_table[p // block_size]. Slots after the last token are never read.

    With 4 query heads and 2 KV heads, query heads 0 and 1 read KV head 0. Scores are divided by the square
    root of head_dim.
    """
    for seq_len, heads in (10, 4), (8, 4), (1, 2), (11, 2):
        caches = random_tensor(2, 9, 4, 2, 8)
        table = [5, 2, 7]
        k, v = (cache[table].flatten(0, 1)[:seq_len].clone() for cache in caches)
        used = torch.zeros(9 * 4, dtype=torch.bool)
        used[[table[i // 4] * 4 + i % 4 for i in range(seq_len)]] = True
        caches.flatten(1, 2)[:, ~used] = float("nan")
        q = 3 * random_tensor(heads, 8, seed=1)
        got = student.attend_blocks(q, caches[0], caches[1], table, seq_len)
        expect_close(f"Attention to {seq_len} tokens with {heads} query heads", got, dense(q, k, v))


def decodes_of(nano: Any, *prompts: str) -> Any:
    """Return the inputs of a batch of decodes, whose sequences have blocks of 4: 1 and 2, 3 and 4, ..."""
    chunks = []
    for i, text in enumerate(prompts):
        seq = make_sequence(nano, text)
        seq.block_table = [2 * i + 1, 2 * i + 2][: -(-len(text) // 4)]
        chunks.append(nano.Chunk(seq, len(text) - 1, len(text), True))
    return nano.build_inputs(chunks, 4)


def padding_of(nano: Any, num_seqs: int, table_width: int = 3) -> Any:
    """Return the inputs of decodes in the null block."""
    seq = make_sequence(nano, "0")
    seq.block_table = [0] * table_width
    return nano.build_inputs([nano.Chunk(seq, 0, 1, True)] * num_seqs, 4)


@says("12")
def pads_to_the_graph(nano: Any) -> None:
    """Three decodes in the graph for four: the first rows are theirs, and the fourth decodes in block 0."""
    padded = nano.pad_decodes(decodes_of(nano, "abc", "efghi", "j"), padding_of(nano, 4))
    for name, expected in {
        "input_ids": [99, 105, 106, 48],
        "positions": [2, 4, 0, 0],
        "slot_mapping": [6, 16, 20, 0],
        "cu_seqlens_q": [0, 1, 2, 3, 4],
        "seq_lens": [3, 5, 1, 1],
        "block_tables": [[1, 0, 0], [3, 4, 0], [5, 0, 0], [0, 0, 0]],
        "query_lens": [1, 1, 1, 1],
    }.items():
        got = getattr(padded, name)
        expect(name, got if name == "query_lens" else got.tolist(), expected)


@says("12")
def pads_nothing_that_fits(nano: Any) -> None:
    """A batch that is as large as the graph has no padding, except that its block tables are as wide."""
    inputs = decodes_of(nano, "abc", "efghi")
    padded = nano.pad_decodes(inputs, padding_of(nano, 2))
    for name in "input_ids", "positions", "slot_mapping", "cu_seqlens_q", "seq_lens":
        expect(name, getattr(padded, name).tolist(), getattr(inputs, name).tolist())
    expect("block_tables", padded.block_tables.tolist(), [[1, 0, 0], [3, 4, 0]])


@says("12")
def leaves_the_padding_alone(nano: Any) -> None:
    """The padding is used again in the next step, so it must not change, and neither must the batch."""
    padding, inputs = padding_of(nano, 4), decodes_of(nano, "abc")
    before = [x.tolist() for x in (*padding[:7], *inputs[:7])]
    padded = nano.pad_decodes(inputs, padding)
    expect("Padding and batch afterwards", [x.tolist() for x in (*padding[:7], *inputs[:7])], before)
    expect("The dtypes", {str(x.dtype) for x in padded[:7]}, {"int32"})


class Recorder:
    """Stands in for a model and its graphs of 1, 2, 4 and 8 rows, and records what runs."""

    def __init__(self, nano: Any) -> None:
        self.ran: list[Any] = []
        self.runner = nano.ModelRunner.__new__(nano.ModelRunner)
        self.runner.model, self.runner.device, self.runner.caches = self.compute, torch.device("cpu"), []
        self.runner.block_size, self.runner.graphs = 4, {}
        for size in 8, 4, 2, 1:
            padding = padding_of(nano, size)
            tensors = nano.send(padding, torch.device("cpu"))._replace(query_lens=[1] * size)
            tensors = tensors._replace(**{n: getattr(tensors, n).clone() for n in tensors._fields[:7]})
            replay = functools.partial(self.replay, size, tensors)
            self.runner.graphs[size] = padding, tensors, torch.full((size, 1), size), replay

    def compute(self, inputs: Any, caches: Any) -> Any:
        """Play the model."""
        self.ran.append(("eager", inputs.input_ids.tolist()))
        return torch.zeros(len(inputs.input_ids), 1)

    def replay(self, size: int, tensors: Any) -> None:
        """Play a graph, which reads its inputs where they were when it was captured."""
        self.ran.append((size, tensors.input_ids.tolist()))


@says("12")
def replays_the_smallest_graph(nano: Any) -> None:
    """Decodes run in the smallest graph with enough rows: three in the graph for four, four there too."""
    for num_seqs, size in (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8):
        record = Recorder(nano)
        hidden = record.runner.compute(decodes_of(nano, *["ab"] * num_seqs))
        expect(f"What runs for {num_seqs} decodes", [what for what, _ in record.ran], [size])
        expect("The hidden states", hidden[:num_seqs].flatten().tolist(), [size] * num_seqs)


@says("12")
def copies_before_it_replays(nano: Any) -> None:
    """The inputs are copied to the tensors that the graph reads, and then the graph is replayed."""
    record = Recorder(nano)
    record.runner.compute(decodes_of(nano, "abc", "efghi", "j"))
    expect("The tokens that the graph reads", record.ran, [(4, [99, 105, 106, 48])])
    _, tensors, _, _ = record.runner.graphs[4]
    expect("Its slots", tensors.slot_mapping.tolist(), [6, 16, 20, 0])
    record.runner.compute(decodes_of(nano, "abcd", "x", "yz"))
    expect("The tokens of the next step", record.ran[1:], [(4, [100, 120, 122, 48])])
    expect("Its block tables", tensors.block_tables.tolist(), [[1, 0, 0], [3, 0, 0], [5, 0, 0], [0, 0, 0]])


@says("12")
def runs_all_else_without_a_graph(nano: Any) -> None:
    """A step with a longer chunk, or with more decodes than the largest graph has rows, has no graph."""
    record = Recorder(nano)
    seq = make_sequence(nano, "abc")
    seq.block_table = [1]
    decode = nano.Chunk(seq, 2, 3, True)
    record.runner.compute(nano.build_inputs([decode, nano.Chunk(seq, 1, 3, True)], 4))
    expect("A decode and a longer chunk", record.ran, [("eager", [99, 98, 99])])
    record.runner.compute(decodes_of(nano, *["a"] * 9))
    expect("Nine decodes", record.ran[1:], [("eager", [97] * 9)])
    record.runner.graphs = {}
    record.runner.compute(decodes_of(nano, "ab"))
    expect("A decode where nothing was captured", record.ran[2:], [("eager", [98])])


@says("13")
def numbers_are_a_function(nano: Any) -> None:
    """The number depends on seed and position only: a call between two equal calls changes nothing."""
    first = nano.uniform(7, 8)
    for other in (1, 2), (7, 9):
        nano.uniform(*other)
    expect("uniform(7, 8), the second time", nano.uniform(7, 8), first)


@says("13")
def numbers_differ(nano: Any) -> None:
    """Another seed or another position gives another number, even if the two are swapped."""
    numbers = {nano.uniform(seed, position) for seed in range(30) for position in range(30)}
    assert len(numbers) > 890, f"900 pairs of seed and position give only {len(numbers)} different numbers."


@says("13")
def numbers_are_uniform(nano: Any) -> None:
    """The numbers are in [0, 1), spread evenly, and those of neighbouring positions are unrelated."""
    rows = torch.tensor([[nano.uniform(seed, i) for i in range(200)] for seed in range(20)])
    assert float(rows.min()) >= 0, "A number is below 0."
    assert float(rows.max()) < 1, "A number is 1 or more."
    counts = torch.histc(rows, 10, 0, 1)
    assert float(counts.min()) > 320, f"4,000 numbers in ten equal intervals: {counts.int().tolist()}."
    assert float(counts.max()) < 480, f"4,000 numbers in ten equal intervals: {counts.int().tolist()}."
    for what, one, other in ("positions", rows[:, 1:], rows[:, :-1]), ("seeds", rows[1:], rows[:-1]):
        related = float(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1])
        assert abs(related) < 0.1, f"The numbers of neighbouring {what} have a correlation of {related:.2f}."


SHARES = [0.1, 0.5, 0.15, 0.25]


def expect_kept(nano: Any, shares: list[float], *rows: tuple[int, float, list[float]]) -> None:
    """Compare what `keep_probable` returns for rows of (top_k, top_p, the expected probabilities)."""
    before = torch.tensor([shares] * len(rows), dtype=torch.float64)
    top_k, top_p = (torch.tensor([[row[i]] for row in rows], dtype=torch.float64) for i in (0, 1))
    got = nano.keep_probable(before, top_k, top_p)
    for row, (k, p, expected) in zip(got.tolist(), rows, strict=True):
        expect(f"{shares} with top_k {k} and top_p {p}", [round(share, 3) for share in row], expected)
    expect("The given probabilities, afterwards", before.tolist(), [shares] * len(rows))


@says("13")
def keeps_the_top_k(nano: Any) -> None:
    """top_k keeps the k most probable tokens, wherever they are, and 0 keeps all. The rest sums to 1."""
    expect_kept(
        nano,
        SHARES,
        (2, 1.0, [0, 0.667, 0, 0.333]),
        (1, 1.0, [0, 1, 0, 0]),
        (0, 1.0, SHARES),
        (9, 1.0, SHARES),
    )


@says("13")
def keeps_until_top_p(nano: Any) -> None:
    """top_p keeps tokens until their sum reaches p: the token that reaches it is kept too."""
    two = [0, 0.667, 0, 0.333]
    expect_kept(nano, SHARES, (0, 0.6, two), (0, 0.75, two), (0, 0.1, [0, 1, 0, 0]), (0, 1.0, SHARES))


@says("13")
def keeps_in_order(nano: Any) -> None:
    """top_k is first, then top_p, which sees probabilities that sum to 1 again."""
    expect_kept(nano, [0.4, 0.3, 0.2, 0.1], (2, 0.5, [1, 0, 0, 0]), (3, 0.75, [0.571, 0.429, 0, 0]))


def expect_samples(
    nano: Any, probabilities: list[float], *rows: tuple[float, int, float, float, int]
) -> None:
    """Compare what `sample` returns for rows of (temperature, top_k, top_p, u, the expected token).

    Each row is sampled alone, and all of them together.
    """
    logits = torch.tensor([probabilities] * len(rows), dtype=torch.float64).log()
    settings = np.array([row[:4] for row in rows]).T
    together = nano.sample(logits, *settings).tolist()
    for i, row in enumerate(rows):
        alone = nano.sample(logits[i : i + 1], *settings[:, i : i + 1]).tolist()
        what = "temperature {}, top_k {}, top_p {} and u = {}".format(*row[:4])
        expect(f"The token with {what}", alone, [row[4]])
        expect(f"The token with {what}, among others", together[i], row[4])


@says("13")
def samples_by_intervals(nano: Any) -> None:
    """The sampled token is the one whose interval contains u. Temperature 0 takes the best one."""
    intervals = [(0.0, 0), (0.05, 0), (0.3, 1), (0.62, 2), (0.76, 3), (1 - 1e-12, 3), (1 - 2**-53, 3)]
    rows = [(1.0, 0, 1.0, u, token) for u, token in intervals]
    best = [(0.0, 0, 1.0, 0.99, 1), (0.0, 2, 0.5, 0.0, 1)]
    expect_samples(nano, SHARES, *rows, *best, (1.0, 2, 1.0, 0.0, 1), (1.0, 1, 1.0, 1 - 1e-12, 1))
    expect_samples(nano, SHARES, *best)


@says("13")
def samples_with_temperature(nano: Any) -> None:
    """The temperature divides the logits: a low one favours probable tokens. It comes before top_p."""
    rows = [(0.5, 0.32, 1), (1.0, 0.32, 0), (2.0, 0.44, 0), (2.0, 0.46, 1), (1e-50, 0.0, 1)]
    expect_samples(nano, [0.4, 0.6], *((t, 0, 1.0, u, token) for t, u, token in rows))
    expect_samples(nano, [0.4, 0.6], (0.5, 0, 0.65, 0.0, 1), (1.0, 0, 0.65, 0.0, 0))


@says("18")
def skips_blocks(student: Any) -> None:
    """With a window of 6, position 16 attends to 11 to 16: it needs neither block 0 nor block 1."""
    for position, window, block_size, expected in [
        (16, 6, 4, 2), (17, 6, 4, 3), (5, 6, 4, 0), (0, 6, 4, 0), (9, 6, 4, 1), (8, 6, 4, 0), (20, 1, 4, 5),
        (16, 6, 3, 3), (1000, 128, 16, 54),
    ]:  # fmt: skip
        what = f"Skipped blocks of {block_size} at position {position} with a window of {window}"
        expect(what, student.num_skipped_blocks(position, window, block_size), expected)


@says("18")
def hits_need_the_window_only(student: Any) -> None:
    """A prefix is a hit if the blocks that its next token attends to are cached. Earlier ones may be gone."""
    for found, expected in [
        ("yyyyy", 5), ("nnnyy", 5), ("nyyny", 3), ("nnyny", 0), ("ynnnn", 1), ("yynny", 2), ("nnnnn", 0),
        ("", 0), ("nnyyn", 4),
    ]:  # fmt: skip
        hit = student.window_hit([letter == "y" for letter in found], 6, 4)
        expect(f"Blocks hit, where y is cached in {found!r} (window 6, blocks of 4)", hit, expected)
    expect("Blocks hit with a window of 1", student.window_hit([False, False], 1, 4), 2)
    expect("Blocks hit with blocks of 3", student.window_hit([False, True, True], 6, 3), 3)


@says("14")
def verifies_in_proportion(student: Any) -> None:
    """A verified token is distributed as p, for any q that the draft was sampled from."""
    p = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    grid = [(i + 0.5) / 30 for i in range(30)]
    for q in [0.2, 0.7, 0.1], [0.5, 0.2, 0.3], [0.0, 1.0, 0.0]:
        shares = torch.zeros(3, dtype=torch.float64)
        for draft, share in enumerate(q):
            for u in grid if share else []:
                for v in grid[1::3]:
                    token = student.verify(draft, p, torch.tensor(q, dtype=torch.float64), u, v)
                    shares[token] += share / 300
        expect_close(f"The distribution with q = {q}", shares, p, atol=0.03)


@says("14")
def accepts_what_p_prefers(student: Any) -> None:
    """A draft to which p gives more probability than q does is always accepted."""
    p, q = torch.tensor([0.6, 0.4]), torch.tensor([0.3, 0.7])
    expect("The token", {student.verify(0, p, q, u / 10, 0.9) for u in range(10)}, {0})
    expect("The token, p(draft) = 0", student.verify(0, torch.tensor([0.0, 1.0]), q, 0.0, 0.5), 1)


@says("16")
def rounds_to_the_grid(student: Any) -> None:
    """A group's smallest number becomes 0 and its largest 15. No number is off by over half a scale."""
    weight = random_tensor(3, 64) + 1
    for group_size in 16, 32:
        integers, scales, zeros = student.quantize(weight.clone(), group_size)
        expect(
            "The shapes of integers and scales",
            (integers.shape, scales.shape),
            ((3, 64), (3, 64 // group_size)),
        )
        expect("The dtype of the integers", integers.dtype, torch.uint8)
        groups = integers.view(3, -1, group_size)
        expect("The smallest integer of each group", set(groups.amin(2).flatten().tolist()), {0})
        expect("The largest integer of each group", set(groups.amax(2).flatten().tolist()), {15})
        again = groups * scales.unsqueeze(2) + zeros.unsqueeze(2)
        off = ((again.flatten(1) - weight).abs().view(groups.shape) / scales.unsqueeze(2)).max()
        assert float(off) <= 0.501, (
            f"A number is off by {float(off):.2f} scales. Rounding is off by at most 0.5."
        )


@says("16")
def groups_are_separate(student: Any) -> None:
    """A group along a row has its own scale: a large number spoils only its group. Equal numbers work."""
    weight = random_tensor(2, 32)
    weight[0, 0], weight[1, 16:] = 100.0, 0.25
    integers, scales, zeros = student.quantize(weight.clone(), 16)
    again = (integers.view(2, 2, 16) * scales.unsqueeze(2) + zeros.unsqueeze(2)).flatten(1)
    expect_close("The group next to a large number", again[0, 16:], weight[0, 16:], atol=0.2)
    expect_close("A group of equal numbers", again[1, 16:], weight[1, 16:])
    expect("The scale of a group of equal numbers", scales[1, 1].item(), 1.0)


@says("16")
def packs_two_in_a_byte(student: Any) -> None:
    """Columns 0 and 1 share the first byte: column 0 in the low 4 bits, column 1 in the high 4 bits."""
    integers = torch.tensor([[1, 2, 15, 0], [7, 8, 0, 15]], dtype=torch.uint8)
    packed = student.pack(integers.clone())
    expect("The bytes of [[1, 2, 15, 0], [7, 8, 0, 15]]", packed.tolist(), [[33, 15], [135, 240]])
    expect("The dtype", packed.dtype, torch.uint8)


@says("16")
def unpacks(student: Any) -> None:
    """`unpack` returns the columns in the order that `pack` got them."""
    packed = torch.tensor([[33, 15], [135, 240]], dtype=torch.uint8)
    expect("The integers", student.unpack(packed).tolist(), [[1, 2, 15, 0], [7, 8, 0, 15]])


@says("16")
def multiplies(student: Any) -> None:
    """The product equals x times the numbers that the integers stand for, for any number of rows."""
    for rows, num_outputs, num_inputs, group_size in (1, 5, 64, 32), (3, 4, 32, 8):
        x, seed = random_tensor(rows, num_inputs, seed=1), rows
        integers = (random_tensor(num_outputs, num_inputs, seed=seed) * 4 + 8).round().clamp(0, 15)
        packed = (integers[:, ::2] + 16 * integers[:, 1::2]).to(torch.uint8)
        scales = random_tensor(num_outputs, num_inputs // group_size, seed=2).abs()
        zeros = random_tensor(num_outputs, num_inputs // group_size, seed=3)
        weight = integers.view(num_outputs, -1, group_size) * scales.unsqueeze(2) + zeros.unsqueeze(2)
        expect_close(
            "The product", student.multiply(x, packed, scales, zeros), x @ weight.flatten(1).T, atol=1e-3
        )
