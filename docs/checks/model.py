"""Checks the model and its attention: lessons 1, 2 and 4."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from docs.checks import expect, says
from docs.checks.parts import expect_close, random_tensor

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 8, 2


def small_model(nano: Any, has_qk_norm: bool = True) -> Any:
    """Return a model with random weights, without a checkpoint."""
    model = nano.Model.__new__(nano.Model)
    sizes: dict[str, tuple[int, ...]] = {
        "q_proj": (32, 24),
        "k_proj": (16, 24),
        "v_proj": (16, 24),
        "o_proj": (24, 32),
    }
    sizes |= {"q_norm": (8,), "k_norm": (8,)}
    shapes = {f"self_attn.{name}": size for name, size in sizes.items()}
    shapes |= {"mlp.gate_proj": (20, 24), "mlp.up_proj": (20, 24), "mlp.down_proj": (24, 20)}
    shapes |= {"input_layernorm": (24,), "post_attention_layernorm": (24,)}
    names = {f"model.layers.{i}.{name}": size for i in range(LAYERS) for name, size in shapes.items()}
    names |= {"model.norm": (24,), "model.embed_tokens": (40, 24)}
    weights = {f"{name}.weight": random_tensor(*size, seed=i) for i, (name, size) in enumerate(names.items())}
    biases = {f"model.layers.1.self_attn.{x}_proj.bias": weights["model.norm.weight"][:16] for x in "kv"}
    model.weights, model.embedding = weights | biases, weights["model.embed_tokens.weight"]
    model.head_dim, model.eps, model.dtype, model.device = HEAD_DIM, 0.01, torch.float32, torch.device("cpu")
    model.has_qk_norm, model.use_flash = has_qk_norm, False
    model.frequencies = nano.rope_frequencies({"rope_theta": 100.0, "rope_type": "default"}, HEAD_DIM)
    return model


def norm_of(x: Tensor, weight: Tensor) -> Tensor:
    """Return x / rms(x) * weight."""
    return x / (x.square().mean(-1, keepdim=True) + 0.01).sqrt() * weight


def dense_model(model: Any, token_ids: list[int], positions: list[int]) -> Tensor:
    """Return what a model must compute for one sequence, by the definition and without a cache."""
    w, num_tokens = model.weights, len(token_ids)
    x = w["model.embed_tokens.weight"][token_ids]
    pairs = torch.polar(
        torch.ones(num_tokens, 4), torch.outer(torch.tensor(positions).float(), model.frequencies)
    )

    def turn(heads: Tensor) -> Tensor:
        turned = torch.complex(*heads.chunk(2, dim=-1)) * pairs.unsqueeze(1)
        return torch.cat((turned.real, turned.imag), dim=-1)

    for i in range(LAYERS):
        at, h = f"model.layers.{i}.", norm_of(x, w[f"model.layers.{i}.input_layernorm.weight"])
        q, k, v = (
            F.linear(h, w[f"{at}self_attn.{n}_proj.weight"], w.get(f"{at}self_attn.{n}_proj.bias")).view(
                num_tokens, -1, HEAD_DIM
            )
            for n in "qkv"
        )
        if model.has_qk_norm:
            q, k = (norm_of(y, w[f"{at}self_attn.{n}_norm.weight"]) for y, n in ((q, "q"), (k, "k")))
        q, k = turn(q), turn(k)
        x = x + F.linear(dense_attention(q, k, v).flatten(1), w[f"{at}self_attn.o_proj.weight"])
        h = norm_of(x, w[f"{at}post_attention_layernorm.weight"])
        gate, up = (F.linear(h, w[f"{at}mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        x = x + F.linear(gate * gate.sigmoid() * up, w[f"{at}mlp.down_proj.weight"])
    return norm_of(x, w["model.norm.weight"])


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of the last len(q) tokens of a sequence, by the definition."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
    is_seen = torch.arange(len(k)) <= torch.arange(len(q)).unsqueeze(1) + len(k) - len(q)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~is_seen, -torch.inf).softmax(-1), v)


@says("1")
def normalizes(nano: Any) -> None:
    """`norm` divides each row by the root of its mean square plus eps, and multiplies by the named weight."""
    for name, shape in ("model.norm", (3, 24)), ("model.layers.0.self_attn.q_norm", (3, 4, 8)):
        model, x = small_model(nano), 0.2 * random_tensor(*shape, seed=5)
        expect_close(
            f"The norm of {shape} numbers", model.norm(x, name), norm_of(x, model.weights[f"{name}.weight"])
        )


@says("1")
def rotates_pairs(nano: Any) -> None:
    """Numbers i and i + D / 2 of a head are a pair, which is rotated by its own angle."""
    x, angles = random_tensor(3, 2, 4), torch.tensor([[0.0, 0.0], [0.5, 2.0], [3.0, -1.0]])
    cos, sin = (y.repeat(1, 2).unsqueeze(1) for y in (angles.cos(), angles.sin()))
    got = nano.rotate(x, cos, sin)
    turned = torch.complex(x[..., :2], x[..., 2:]) * torch.polar(torch.ones(3, 2), angles).unsqueeze(1)
    expect_close("The rotated heads", got, torch.cat((turned.real, turned.imag), dim=-1))


@says("1")
def scores_depend_on_distances(nano: Any) -> None:
    """The dot product of a rotated query and a rotated key depends only on how far apart they are."""
    q, k, frequencies = (
        random_tensor(1, 1, 8),
        random_tensor(1, 1, 8, seed=1),
        torch.tensor([1.0, 0.3, 0.1, 0.01]),
    )

    def at(x: Tensor, position: int) -> Any:
        angles = (position * frequencies).repeat(2).view(1, 1, 8)
        return nano.rotate(x, angles.cos(), angles.sin())

    scores = torch.stack([(at(q, i + 5) * at(k, i)).sum() for i in (0, 1, 30)])
    expect_close("Scores at a distance of 5", scores, scores[:1].expand(3))
    expect_close("The length of a rotated query", at(q, 7).norm(), q.norm())


def run_model(nano: Any, model: Any, token_ids: list[int], positions: list[int]) -> Any:
    """Call the model with the attention of one sequence without a cache."""

    def attention(q: Tensor, k: Tensor, v: Tensor, cache: Any, inputs: Any, use_flash: bool) -> Tensor:
        asked.append((cache, inputs.slot_mapping.dtype, use_flash))
        return dense_attention(q, k, v)

    asked: list[Any] = []
    nano.attention = attention
    tensors = [torch.tensor(x, dtype=torch.int32) for x in (token_ids, positions, positions)]
    inputs = nano.ModelInputs(*tensors, None, None, None, None, [len(token_ids)], [len(token_ids)])
    hidden = model(inputs, ["cache of layer 0", "cache of layer 1"])
    caches = ["cache of layer 0", "cache of layer 1"]
    expect("The caches that attention gets", [cache for cache, _, _ in asked], caches)
    expect("The dtype of the slots, and use_flash", {x[1:] for x in asked}, {(torch.int64, False)})
    return hidden


@says("1")
def computes_hidden_states(nano: Any) -> None:
    """The model computes what its definition says: with norms of queries and keys or without them.

    Some linear layers have a bias. Each layer's attention gets the cache of that layer.
    """
    for has_qk_norm in True, False:
        model = small_model(nano, has_qk_norm)
        token_ids, positions = [3, 1, 4, 1, 39], [0, 1, 2, 3, 4]
        got = run_model(nano, model, token_ids, positions)
        expect_close("The hidden states", got, dense_model(model, token_ids, positions))


@says("1")
def uses_the_positions(nano: Any) -> None:
    """A token is rotated by its position, not by its row: a chunk may begin anywhere."""
    model = small_model(nano)
    got = run_model(nano, model, [5, 6, 7], [20, 22, 25])
    expect_close(
        "The hidden states at positions 20, 22, 25", got, dense_model(model, [5, 6, 7], [20, 22, 25])
    )


class Cached:
    """Holds the cache of a layer in blocks, and attends with it."""

    def __init__(self, nano: Any, block_size: int = 4) -> None:
        self.nano, self.block_size = nano, block_size
        self.cache = random_tensor(9, block_size, 2, 8, seed=7), random_tensor(9, block_size, 2, 8, seed=8)

    def slots(self, table: list[int], start: int, end: int) -> list[int]:
        """Return the slots of positions [start, end)."""
        return [
            table[p // self.block_size] * self.block_size + p % self.block_size for p in range(start, end)
        ]

    def attend(
        self, *chunks: tuple[list[int], int, int], scale: float = 1.0
    ) -> tuple[Tensor, Tensor, Any, Any]:
        """Attend for chunks of (block table, start, end). Returns the result, and what it must be."""
        num_rows = sum(end - start for _, start, end in chunks)
        q, k, v = (scale * random_tensor(num_rows, h, 8, seed=s) for s, h in enumerate((4, 2, 2)))
        slots = [slot for chunk in chunks for slot in self.slots(*chunk)]
        before = [x.clone() for x in self.cache]
        lens, keys = [end - start for _, start, end in chunks], [end for _, _, end in chunks]
        width = max(len(table) for table, _, _ in chunks)
        tables = [table + [0] * (width - len(table)) for table, _, _ in chunks]
        positions = [p for _, start, end in chunks for p in range(start, end)]
        ends = torch.tensor([0, *lens]).cumsum(0)
        arrays = [[0] * num_rows, positions, slots, ends.tolist(), [0, *keys], keys, tables]
        inputs = self.nano.ModelInputs(*(torch.tensor(x, dtype=torch.int32) for x in arrays), lens, keys)
        inputs = inputs._replace(slot_mapping=inputs.slot_mapping.long())
        got = self.nano.attention(q, k, v, self.cache, inputs, False)
        for stored, old, new in zip(self.cache, before, (k, v), strict=True):
            old.flatten(0, 1)[slots] = new
            expect_close("The cache afterwards", stored, old)
        expected = []
        for (table, _, end), first, last in zip(chunks, ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            known = [x.flatten(0, 1)[self.slots(table, 0, end)] for x in before]
            expected.append(dense_attention(q[first:last], *known))
        return got, torch.cat(expected), q, inputs


@says("2")
def writes_then_attends(nano: Any) -> None:
    """The new K and V are written to their slots, and nothing else. Then the tokens attend to all keys."""
    cached = Cached(nano, block_size=16)
    for start, end in (0, 5), (5, 6), (6, 7), (7, 12):
        got, expected, _, _ = cached.attend(([3], start, end))
        expect_close(f"Attention of tokens [{start}, {end})", got, expected)


@says("2")
def sees_no_later_token(nano: Any) -> None:
    """A token does not see the tokens after it: their K and V change nothing."""
    cached = Cached(nano, block_size=16)
    got, expected, _, _ = cached.attend(([2], 0, 6))
    expect_close("Attention of a prompt", got, expected)
    cached.cache[0][2, 6:] = cached.cache[1][2, 6:] = 1e4
    got, expected, _, _ = cached.attend(([2], 4, 6), scale=0.5)
    expect_close("Attention of its last tokens, with large numbers after them", got, expected)


@says("4")
def attends_through_tables(nano: Any) -> None:
    """A sequence's keys are in the blocks of its table, in order: prompts, chunks and decodes at once."""
    for chunks in [
        [([7, 2, 5], 0, 10)],
        [([7, 2, 5], 8, 10)],
        [([7, 2], 4, 5), ([3], 2, 3), ([1, 4, 6], 9, 10)],
        [([7, 2], 3, 8), ([3, 8], 4, 5), ([1, 4, 6], 5, 10), ([5], 0, 2)],
    ]:
        got, expected, _, _ = Cached(nano).attend(*chunks)
        expect_close(f"Attention of (table, start, end) {chunks}", got, expected)


@says("4")
def reads_what_the_step_writes(nano: Any) -> None:
    """A sequence may hit blocks that another one fills in the same step, also if that one comes later."""
    for chunks in [([5, 6], 0, 8), ([5, 6, 7], 8, 9)], [([5, 6, 7], 8, 9), ([5, 6], 0, 8)]:
        got, expected, _, _ = Cached(nano).attend(*chunks)
        expect_close("Attention of both sequences", got, expected)


@says("4")
def decodes_in_one_call(nano: Any) -> None:
    """All decodes of a step take one call of scaled_dot_product_attention, whatever their lengths."""
    calls, real = list[int](), nano.F.scaled_dot_product_attention

    def counted(*given: Any, **how: Any) -> Any:
        calls.append(len(given[0]))
        return real(*given, **how)

    nano.F = SimpleNamespace(**{**vars(F), "scaled_dot_product_attention": counted})
    Cached(nano).attend(([7, 2], 4, 5), ([3], 2, 3), ([1, 4, 6], 9, 10))
    expect("The number of sequences in each call", calls, [3])
