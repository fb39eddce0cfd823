"""Stand-ins for what only a GPU has, written from the documented signatures and semantics.

They check every argument as the real functions do, and compute the answer densely, one sequence at a
time. Sources: flash-attn 2.8's `flash_attn_interface.py` and the checks of `csrc/flash_attn/flash_api.cpp`;
`torch.nn.attention.varlen` of PyTorch 2.13.
"""

import contextlib
import importlib.machinery
import importlib.util
import itertools
import os
import sys
import types
from collections import Counter
from typing import Any
from unittest.mock import Mock

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from nanoengine.backends.cuda import CUDA
from nanoengine.backends.device import Device
from nanoengine.backends.flash_attention import FlashAttention, FlashKernels, VarlenAttention
from nanoengine.backends.torch_attention import TorchAttention
from nanoengine.backends.triton_attention import TritonAttention
from nanoengine.models.decoder import PlainKernels
from nanoengine.sampling.drawing import draw_chunks
from tests.attention import dense

calls: Counter[str] = Counter()  # which path was taken how often


def attend(q, k, v, scale, causal, window_size, softcap, alibi_slopes=None):
    """Attend with the last query at the last key (bottom-right aligned)."""
    left, right = window_size
    assert causal or right == 0 or (len(q) == 1 and right == -1), "a query would see later keys"
    # A value is read even where it is masked, but for tiles of keys; the largest have 256, as a page has.
    first = max(0, len(k) - len(q) - left) // 256 * 256 if left >= 0 else 0
    v = torch.cat((torch.zeros_like(v[:first]), v[first:]))
    window = left + 1 if left >= 0 else None
    return dense(q, k, v, scale, window, softcap or None, alibi_slopes=alibi_slopes).to(q.dtype)


def check_devices(*tensors: Tensor) -> None:
    assert len({x.device for x in tensors}) == 1, "Input tensors must be on one device"


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert q.dtype in FlashKernels.dtypes  # fp16 and bf16, unless a test has to compare exactly
    assert k.dtype == v.dtype == q.dtype
    for x in (q, k, v):
        assert x.stride(-1) == 1, "Input tensor must have contiguous last dimension"
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    assert q.shape[-1] <= 256
    assert q.shape[-2] % k.shape[-2] == 0
    assert k.shape == v.shape


def check_int32(x: Tensor, *shape: int) -> None:
    assert isinstance(x, Tensor)
    assert x.dtype == torch.int32
    assert x.is_contiguous()
    assert x.shape == shape


def check_pages(k: Tensor, block_table: Tensor, num_seqs: int) -> None:
    assert k.dim() == 4
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert block_table.dtype == torch.int32
    assert block_table.stride(-1) == 1, "block_table must have contiguous last dimension"
    assert block_table.dim() == 2
    assert len(block_table) == num_seqs
    assert 0 <= block_table.min() <= block_table.max() < len(k)


def check_slopes(slopes: Tensor | None, q: Tensor) -> None:
    if slopes is not None:
        assert slopes.dtype == torch.float32, "ALiBi slopes must have dtype fp32"
        check_devices(slopes, q)
        assert slopes.stride(-1) == 1, "ALiBi slopes tensor must have contiguous last dimension"
        assert slopes.shape == (q.shape[-2],)  # or one of each sequence, which nothing here asks for


def pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    assert length <= len(table) * cache.shape[1]
    return cache[table.long()].flatten(0, 1)[:length]


def lengths(cu_seqlens: Tensor) -> list[int]:
    assert cu_seqlens[0] == 0
    return cu_seqlens.diff().tolist()


def varlen(
    q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, window_size, softcap, block_table,
    num_written=None, alibi_slopes=None,
):  # fmt: skip
    """Attend like FlashAttention. Write the rows of the first num_written sequences, or of all."""
    check_tensors(q, k, v)
    check_devices(q, k, v, cu_q, cu_k, *([] if block_table is None else [block_table]))
    check_slopes(alibi_slopes, q)
    num_seqs = len(cu_q) - 1
    assert num_seqs > 0
    check_int32(cu_q, num_seqs + 1)
    check_int32(cu_k, num_seqs + 1)
    query_lens, key_lens = lengths(cu_q), lengths(cu_k)
    assert sum(query_lens) == len(q)
    assert isinstance(max_q, int)
    assert isinstance(max_k, int)
    assert max(query_lens) <= max_q  # a smaller one leaves rows uncomputed without a word
    assert max(key_lens) <= max_k
    if block_table is None:
        assert k.dim() == 3
        assert sum(key_lens) == len(k)
    else:
        check_pages(k, block_table, num_seqs)
    out = torch.full_like(q, torch.nan)  # the real one is uninitialized
    firsts = zip(cu_q.tolist()[:-1], cu_k.tolist()[:-1], strict=True)
    for i, (first, key_first) in itertools.islice(enumerate(firsts), num_written):
        if block_table is None:
            keys, values = (x[key_first : key_first + key_lens[i]] for x in (k, v))
        else:
            keys, values = (pages(x, block_table[i], key_lens[i]) for x in (k, v))
        rows = slice(first, first + query_lens[i])
        out[rows] = attend(q[rows], keys, values, scale, causal, window_size, softcap, alibi_slopes)
    return out


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None,
):  # fmt: skip
    assert dropout_p == 0.0
    assert not return_attn_probs
    calls["varlen contiguous" if block_table is None else "varlen paged"] += 1
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        scale, causal, window_size, softcap, block_table, alibi_slopes=alibi_slopes,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # fmt: skip
    others = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad)
    assert all(x is None for x in others)
    assert not return_softmax_lse
    calls["with_kvcache"] += 1
    num_seqs, query_len, _, head_dim = q.shape
    check_tensors(q, k_cache, v_cache)
    check_devices(q, k_cache, v_cache, cache_seqlens, block_table)
    check_int32(cache_seqlens, num_seqs)
    check_pages(k_cache, block_table, num_seqs)
    check_slopes(alibi_slopes, q)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.full_like(q, torch.nan)
    for i, length in enumerate(cache_seqlens.tolist()):
        assert length >= query_len
        keys, values = (pages(x, block_table[i], length) for x in (k_cache, v_cache))
        out[i] = attend(q[i], keys, values, scale, causal, window_size, softcap, alibi_slopes)
    return out


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """If it splits the keys, it writes only the first sequence's rows, as in PyTorch 2.13.

    Its heuristic splits where there are few sequences and heads, which a test's few are. The exception
    are decodes of grouped heads without a mask: their queries are laid out as a batch before.
    Source: ATen's `mha_varlen_fwd`, and https://github.com/pytorch/pytorch/issues/194167
    """
    assert return_aux is None
    calls["varlen contiguous" if block_table is None else "varlen paged"] += 1
    assert enable_gqa or query.shape[1] == key.shape[-2], "Try setting enable_gqa=True for GQA"
    num_written = None
    if block_table is not None:
        check_int32(seqused_k, len(cu_seq_q) - 1)
        check_devices(query, seqused_k)
        assert seqused_k.tolist() == lengths(cu_seq_k)
        heads, kv_heads = query.shape[1], key.shape[2]
        is_packed = max_q == 1 and heads > kv_heads and window_size == (-1, -1)
        # A thread block processes so many keys at a time.
        max_keys = 256 if query.shape[2] <= 64 else 128 if query.shape[2] <= 128 else 64
        if num_splits != 1 and max_k > max_keys and not is_packed:
            num_written = 1
        calls["varlen packed"] += is_packed
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return varlen(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
        scale, window_size == (-1, 0), window_size, 0.0, block_table, num_written,
    )  # fmt: skip


def write_kv(k_cache, v_cache, k, v, slots):
    assert slots.dtype == torch.int64
    for cache, x in ((k_cache, k), (v_cache, v)):
        assert cache.is_contiguous()
        assert x.stride()[1:] == (x.shape[2], 1)
        cache.view(-1, *x.shape[1:])[slots] = x
    calls["write_kv"] += 1


class GraphRecorder:
    """Replays a capture by running it again on the same tensors."""

    def __init__(self, stream):
        assert stream is FakeGPU.capture_stream

    def record(self, run):
        run()
        run()

        def replay():
            calls["replay"] += 1
            run()

        return replay


class Tape(TorchDispatchMode):
    """Records operators, and repeats them on the same tensors."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.operators.append((function, args, kwargs or {}, out))
        return out

    def replay(self):
        calls["piece"] += 1
        for function, args, kwargs, out in self.operators:
            repeated = function(*args, **kwargs)
            if function._schema.is_mutable:
                continue  # it wrote to a tensor that was given
            for old, new in zip(*map(torch.utils._pytree.tree_leaves, (out, repeated)), strict=True):
                # A schema does not say whether `to` or `reshape` returned a view of what it was given.
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recorder:
    """Replays pieces from a tape, which holds what is launched between `begin` and `end`."""

    def __init__(self, stream):
        assert stream is FakeGPU.capture_stream
        self.tape = None

    def capturing(self):
        return contextlib.nullcontext()

    def begin(self):
        assert self.tape is None
        self.tape = Tape()
        self.tape.__enter__()

    def end(self):
        tape, self.tape = self.tape, None
        tape.__exit__(None, None, None)
        return tape.replay


class TritonKernels:
    """Computes with PyTorch what the kernels do. They write K and V to their places."""

    def __init__(self, plain):
        self.plain = plain

    rms_norm, silu_and_mul = staticmethod(PlainKernels.rms_norm), staticmethod(PlainKernels.silu_and_mul)

    def norm_rotate_both(self, q, k, v, *of_heads, attention, cache):
        where = attention.place_for(q, cache)
        q, k, v = self.plain.norm_rotate_both(q, k, v, *of_heads)
        if where is None:
            return q, k, v
        where[0].copy_(q)
        write_kv(cache.k, cache.v, k.contiguous(), v, where[1])
        return where[0], cache.k, cache.v


class FakeGPU(CUDA):
    """A CPU that the engine drives like a GPU. What only a GPU has is as on any other device."""

    capability = (9, 0)
    capture_stream = object()
    max_num_batched_tokens = 1024  # steps of 8192 take a CPU long
    running = Device.running
    block_size = 256

    def backends(self):
        if self.config.attn_backend == "varlen":
            return (VarlenAttention,)
        return FlashAttention, TritonAttention, TorchAttention

    def release(self):
        self.staging = None


def install_linear(monkeypatch):
    """Let PyTorch multiply by quantized weights, in float32, in place of the Triton kernel."""
    monkeypatch.setattr("nanoengine.backends.flash_attention.FlashKernels.dtypes", (torch.float32,))
    name = "nanoengine.backends.triton_linear"
    monkeypatch.setattr(f"{name}.TritonLinear.forward", lambda self, x: linear(x, self.weight, self.bias))
    monkeypatch.setattr(f"{name}.try_out", lambda *_: None)


def pinned_memory(shape, dtype):
    """Return ordinary memory, because pinned memory needs a GPU."""
    memory = torch.empty(*shape, dtype=dtype)
    return memory, memory.numpy()


def install(monkeypatch) -> Counter[str]:
    """Install the doubles in place of the originals. Returns the count of calls by path."""
    monkeypatch.setattr("nanoengine.backends.cuda.GraphRecorder", GraphRecorder)
    monkeypatch.setattr("nanoengine.backends.cuda.Recorder", Recorder)
    if os.environ.get("TRITON_INTERPRET") == "1":  # the tape misses what the interpreter computes
        monkeypatch.setattr("nanoengine.backends.cuda.PromptGraphs", lambda forward, *_: forward)
    few = lambda largest: sorted({min(64, largest), min(300, largest), largest})  # noqa: E731 (a CPU is slow)
    monkeypatch.setattr("nanoengine.backends.prompt_graphs.token_counts", few)
    monkeypatch.setattr("nanoengine.backends.triton_layers.TritonKernels", TritonKernels)
    monkeypatch.setattr("nanoengine.backends.triton_layers.draw_chunks", draw_chunks)
    monkeypatch.setattr("torch.cuda.Event", lambda: Mock(spec=["record", "synchronize"]))
    monkeypatch.setattr("nanoengine.backends.cuda.pinned_memory", pinned_memory)
    monkeypatch.setattr("nanoengine.backends.cpu.cpu_device.CPU", FakeGPU)
    memory = {  # of a card of 1 GiB, of which something else holds 64 MiB, and this process 30 MiB
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "max_memory_allocated": 100 << 20,
        "mem_get_info": (960 << 20, 1 << 30),
        "memory_allocated": 30 << 20,
        "memory_reserved": 68 << 20,
    }
    for name, value in memory.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device=None, value=value: value)
    monkeypatch.setattr("torch._C._cuda_clearCublasWorkspaces", lambda: None, raising=False)
    module: Any = types.ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)  # transformers looks for it
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr("nanoengine.backends.flash_attention.write_kv", write_kv)
    if importlib.util.find_spec(name := "torch.nn.attention.varlen") is None:  # an older PyTorch
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setattr(torch.nn.attention, "varlen", sys.modules[name], raising=False)
    monkeypatch.setattr(f"{name}.varlen_attn", varlen_attn, raising=False)
    calls.clear()
    return calls
