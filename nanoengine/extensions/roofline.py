"""Predicts an ideal engine's speed on this machine from memory bandwidth and matrix FLOPs per second."""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn


def roofline_seconds(
    config: Any,
    prompt_lens: list[int],
    output_lens: list[int],
    shared: int = 0,
    *,
    bandwidth: float,
    flops: float,
    itemsize: int = 2,
    weight_bits: tuple[float, float] | None = None,
) -> float:
    """Return the seconds an ideal engine would take for a workload on a machine with these two limits.

    The ideal engine computes all prompts in one pass, then one token per unfinished request in each pass. A
    pass takes as long as its memory traffic or its arithmetic, whichever is longer:

        bytes   every weight once, and for each sequence the K and V of every token attended to (none in
                the first pass, which has just computed them)
        FLOPs   2 per weight and token, for the vocabulary's weights only at tokens that sample; and
                4 * heads * head_dim per layer for each pair of a token and a token it attends to

    A shared prefix is computed once. Norms, activations, sampling and the host cost nothing, and attention
    is full. A model that fits in the CPU's caches can be faster than this. `config` is a `DecoderConfig`.
    `prompt_lens` leave out the prefix of `shared` tokens. `bandwidth` and `flops` are per second, `itemsize`
    is in bytes. For quantized weights, `weight_bits` are the bits per weight in the layers and in the head.
    """
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention_weights = config.hidden_size * (2 * q_size + 2 * kv_size)
    mlp_weights = 3 * config.hidden_size * config.intermediate_size
    layer_weights = config.num_layers * (attention_weights + mlp_weights)
    head_weights = config.hidden_size * config.vocab_size
    layer_bytes, head_bytes = (bits / 8 for bits in weight_bits or (8 * itemsize, 8 * itemsize))
    weight_bytes = layer_weights * layer_bytes + head_weights * head_bytes

    def pass_seconds(tokens: int, due: int, pairs: int, tokens_read: int) -> float:
        num_bytes = weight_bytes + itemsize * 2 * config.num_layers * kv_size * tokens_read
        work = 2 * (layer_weights * tokens + head_weights * due) + 4 * config.num_layers * q_size * pairs
        return float(max(num_bytes / bandwidth, work / flops))

    prefix_pairs = shared * (shared + 1) // 2
    prompt_pairs = sum(shared * n + n * (n + 1) // 2 for n in prompt_lens)
    seconds = pass_seconds(shared + sum(prompt_lens), len(prompt_lens), prefix_pairs + prompt_pairs, 0)
    for step in range(1, max(output_lens)):
        contexts = [shared + n + step for n, m in zip(prompt_lens, output_lens, strict=True) if m > step]
        seconds += pass_seconds(len(contexts), len(contexts), sum(contexts), sum(contexts))
    return seconds


def measure_limits(dtype_name: str, device_name: str) -> dict[str, Any]:
    """Measure the machine's memory bandwidth and matrix rate with linear layers, as an engine uses them.

    A stack of weights larger than the caches is applied to 1, 8, ... rows with the fastest kernel available,
    in the workload's precision and in float32. If a processor emulates the workload's precision, float32 is
    faster, and no less accurate. With one row, every weight is read for two FLOPs: its time gives the
    bandwidth. The best rate over all numbers of rows is the matrix rate. Returns "bandwidth" in bytes per
    second, and "flops" per second for each number of rows.
    """
    device = torch.device(device_name)
    # Rows -> number of layers used. On a CPU many rows are slow, and two layers are enough for a rate.
    if device.type == "cpu":
        size, num_layers, num_rounds = 4096, 8, 1
        layers_used = {1: num_layers, 8: num_layers, 16: num_layers, 32: num_layers, 64: 2, 256: 2}
    else:  # a GPU's work must take longer than launching it and waiting for its end
        size, num_layers, num_rounds = 8192, 4, 10
        layers_used = dict.fromkeys((1, 64, 256, 1024, 4096), num_layers)

    def stack(dtype: torch.dtype, pack: Callable[[nn.Linear], nn.Module]) -> list[nn.Module]:
        layers = []
        for _ in range(num_layers):
            layer = nn.Linear(size, size, bias=False, dtype=dtype, device="meta").to_empty(device=device)
            layer.requires_grad_(False).weight.fill_(0.01)
            layers.append(pack(layer))
        return layers

    packs: list[Callable[[nn.Linear], nn.Module]] = [lambda layer: layer]
    if device.type == "cpu":
        with suppress(RuntimeError):  # no compiler
            from nanoengine.backends.cpu.kernels import Kernels
            from nanoengine.backends.cpu.packed_layers import pack_linear

            packs = [lambda layer: pack_linear(layer, None)]
            packs.append(partial(pack_linear, kernels=Kernels()))

    def seconds(rows: int, layers: list[nn.Module], dtype: torch.dtype) -> float:
        x = torch.full((rows, size), 0.01, dtype=dtype, device=device)
        start = time.perf_counter()
        for layer in layers[: layers_used[rows]] * num_rounds:
            layer(x)
        if device.type != "cpu":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / num_rounds

    bandwidth, flops = 0.0, {str(rows): 0.0 for rows in layers_used}
    for dtype in dict.fromkeys((getattr(torch, dtype_name), torch.float32)):
        for pack in packs:
            layers = stack(dtype, pack)
            with torch.inference_mode():
                best = {rows: min(seconds(rows, layers, dtype) for _ in range(3)) for rows in layers_used}
            bandwidth = max(bandwidth, num_layers * size * size * dtype.itemsize / best[1])
            for rows, least in best.items():
                rate = 2 * rows * layers_used[rows] * size * size / least
                flops[str(rows)] = max(flops[str(rows)], rate)
            del layers  # before the next stack is made: an engine in this process leaves little memory
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {"bandwidth": bandwidth, "flops": flops}
