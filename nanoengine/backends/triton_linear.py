"""Linear layers with quantized weights on a GPU: a Triton kernel that reads 4 or 8 bits per weight.

A program holds a tile of outputs for a tile of tokens. It walks over the inputs, turns one tile of integers
at a time into weights of the layer's dtype, as `Quantized.dequantize` does, and multiplies them on tensor
cores. A step with few tokens has too few tiles to fill a GPU, so the inputs are divided among programs, and
PyTorch adds their sums. Grids are computed from values that the host knows, as CUDA graphs require.
"""

from __future__ import annotations  # Triton's types do not exist without Triton

import functools
import threading
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from nanoengine.backends.packing import Form
from nanoengine.backends.quantization import Quantized, quantize
from nanoengine.backends.triton_attention import _dot, generation, kernel

with suppress(ImportError):  # Windows, and PyTorch for the CPU
    import triton
    import triton.language as tl

MAX_STEP = 64  # how many bytes of a row of packed weights are loaded at once
MAX_PROGRAMS, MIN_STEPS = 512, 4  # limit on programs that share the inputs; the least steps of each
# The size of a program: outputs, tokens, steps that are loaded at once, and warps.
FEW, MANY = (64, 16, 4, 4), (64, 128, 2, 8)  # up to 16 tokens, and more
HOPPER = (64, 128, 2, 4)  # four warps issue a product together
SMALL = (16, 16, 2, 4)  # where Triton does not use tensor cores
TRYING = threading.Lock()  # the threads that pack weights wait for the first, which compiles the kernel


@kernel
def _linear_kernel(  # type: ignore[no-untyped-def]
    out,  # (splits, T, N)
    x,  # (T, I)
    packed,  # (N, BYTES) int8
    scales,  # (G, N) float16
    zeros,  # (G, N) float16, or None
    bias,  # (N,), or None
    num_tokens,
    num_steps,  # how many steps of a row a program reads
    I, N, BYTES,  # noqa: E741 (arguments, so that layers of different sizes share a kernel)
    PARTS: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr,  # PARTS: integers in a byte
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of tokens and outputs, over the inputs of one split."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    offsets = tl.arange(0, STEP)
    is_output, is_token = outputs < N, tokens < num_tokens
    columns = packed + outputs.to(tl.int64)[None, :] * BYTES + offsets[:, None]
    rows = x + tokens.to(tl.int64)[:, None] * I + offsets[None, :]
    acc = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    first_step = split * num_steps
    for step in range(first_step, tl.minimum(first_step + num_steps, BYTES // STEP)):
        byte = step * STEP
        held = tl.load(columns + byte, mask=is_output[None, :], other=0)
        for part in tl.static_range(PARTS):
            integers = held
            if PARTS == 2:  # the lower four bits, then the upper four, both with their sign
                integers = (held << 4) >> 4 if part == 0 else held >> 4
            weights = integers.to(tl.float32)
            first = byte * PARTS + part * STEP
            at, is_scale = first // GROUP * N + outputs, is_output & (first < I)  # past I there is padding
            if zeros is not None:
                weights -= tl.load(zeros + at, mask=is_scale, other=0.0).to(tl.float32)[None, :]
            weights *= tl.load(scales + at, mask=is_scale, other=0.0).to(tl.float32)[None, :]
            inputs = tl.load(rows + first, mask=is_token[:, None] & (first < I), other=0.0)
            acc += _dot(inputs, weights.to(inputs.dtype), UPCAST)
    if bias is not None:
        acc += tl.load(bias + outputs, mask=is_output & (split == 0), other=0.0).to(tl.float32)[None, :]
    at = (split * num_tokens + tokens).to(tl.int64)[:, None] * N + outputs[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])


class TritonLinear(nn.Module):
    """A linear layer with a weight that `Quantized.fitted` returned.

    A program loads `step` bytes of a row at once. With 4 bits, their lower halves are `step` inputs, and
    their upper halves the next ones, so each half is a tile of consecutive inputs of one group.
    """

    packed: Tensor  # (N, bytes) int8
    scales: Tensor  # (G, N) float16
    zeros: Tensor | None  # (G, N) float16

    def __init__(self, weight: Quantized, bias: Tensor | None, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.out_features, self.in_features = weight.integers.shape
        self.form = Form(weight.bits, weight.group, int(weight.zeros is not None))
        self.bias, self.dtype, self.step = bias, dtype, min(weight.group, MAX_STEP)
        packed = weight.integers
        if weight.bits == 4:
            padded = nn.functional.pad(packed, (0, -self.in_features % (2 * self.step)))
            low, high = padded.view(len(padded), -1, 2, self.step).unbind(2)
            packed = (low & 15 | high << 4).flatten(1)
        halves = (None if x is None else x.T.half() for x in (weight.scales, weight.zeros))
        for name, kept in zip(("packed", "scales", "zeros"), (packed, *halves), strict=True):
            self.register_buffer(name, None if kept is None else kept.contiguous().to(device), False)

    @property
    def weight(self) -> Tensor:
        """The weight, (out, in), dequantized at each access: some models read it."""
        return self.rows(torch.arange(self.out_features, device=self.packed.device))

    def rows(self, rows: Tensor) -> Tensor:
        """Return rows (..) of the weight: (.., in)."""
        held, ids = self.packed[rows.flatten()], rows.flatten()
        parts = [held << 4 >> 4, held >> 4] if self.form.bits == 4 else [held]
        tiles = [part.view(len(ids), held.shape[1] // self.step, self.step) for part in parts]
        integers = torch.stack(tiles, 2).flatten(1)
        of_rows: Any = [None if x is None else x.T[ids].float() for x in (self.scales, self.zeros)]
        chosen = Quantized._make((integers[:, : self.in_features], *of_rows, self.form.bits))
        return chosen.dequantize(self.dtype).view(*rows.shape, self.in_features)

    def rounded(self, weight: Tensor) -> TritonLinear:
        """Return a layer made from rows of a new weight, (rows, in), rounded like this one."""
        integers = quantize(weight.to("cpu", self.dtype), self.form.bits)
        return TritonLinear(integers, None, self.dtype, self.packed.device)

    def holds(self, weight: Tensor) -> bool:
        """Return whether the layer was made from this weight, (out, in)."""
        return all(map(torch.equal, self.buffers(), self.rounded(weight).buffers()))

    def load_rows(self, first: int, weight: Tensor) -> None:
        """Replace rows from `first` on, in place, because CUDA graphs hold addresses."""
        new, end = self.rounded(weight), first + len(weight)
        self.packed[first:end], self.scales[:, first:end] = new.packed, new.scales

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (.., in) -> (.., out)."""
        flat = x.reshape(-1, self.in_features).contiguous()
        num_tokens, (num_outputs, num_bytes) = len(flat), self.packed.shape
        gpu = generation(x.device)
        tiles = FEW if num_tokens <= FEW[1] else HOPPER if gpu == "sm90" else MANY
        outputs, tokens, stages, warps = SMALL if x.dtype == torch.float32 or gpu == "sm75" else tiles
        grid = -(-num_outputs // outputs), max(1, -(-num_tokens // tokens))
        all_steps = num_bytes // self.step
        num_splits = max(1, min(MAX_PROGRAMS // (grid[0] * grid[1]), all_steps // MIN_STEPS))
        num_steps = -(-all_steps // num_splits)
        num_splits = -(-all_steps // num_steps)
        out_dtype = torch.float32 if num_splits > 1 else x.dtype
        out = torch.empty(num_splits, num_tokens, num_outputs, dtype=out_dtype, device=x.device)
        sizes: dict[str, Any] = {"PARTS": 8 // self.form.bits, "GROUP": self.form.group, "STEP": self.step}
        sizes |= {"OUTPUTS": outputs, "TOKENS": tokens}
        # Triton's interpreter would multiply the bits of bfloat16 as integers.
        sizes["UPCAST"] = x.dtype == torch.bfloat16 and triton.knobs.runtime.interpret
        tensors = out, flat, self.packed, self.scales, self.zeros, self.bias
        numbers = num_tokens, num_steps, self.in_features, num_outputs, num_bytes
        _linear_kernel[(*grid, num_splits)](*tensors, *numbers, **sizes, num_stages=stages, num_warps=warps)
        return (out[0] if num_splits == 1 else out.sum(0).to(x.dtype)).view(*x.shape[:-1], num_outputs)


def try_out(form: Form, dtype: torch.dtype, device: torch.device) -> None:
    """Compute a small layer for one token and for many. Raises RuntimeError if the results are wrong."""
    with TRYING:
        _try_out(form, dtype, device)


@functools.cache
def _try_out(form: Form, dtype: torch.dtype, device: torch.device) -> None:
    middle = 1 << (form.bits - 1)
    integers = torch.arange(48 * 3 * form.group).view(48, -1) * 7 % (2 * middle) - middle
    scales, zeros = torch.full((48, 3), 0.25), torch.ones(48, 3) if form.has_zeros else None
    layer = TritonLinear(Quantized(integers.to(torch.int8), scales, zeros, form.bits), None, dtype, device)
    for num_tokens in (1, FEW[1] + 1):
        x = torch.arange(num_tokens * layer.in_features, device=device).sin().view(num_tokens, -1).to(dtype)
        expected = x.float() @ layer.weight.float().T
        if not (layer(x) - expected).abs().max() < 0.02 * expected.abs().max():
            raise RuntimeError("it computed wrong results")
