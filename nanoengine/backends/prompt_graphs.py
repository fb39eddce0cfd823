"""CUDA graphs of steps with prompts, cut at attention.

Attention depends on the lengths of a step's sequences, so it runs as usual. Everything between two calls of
it depends on the number of tokens only, and is one graph, a piece. A step is padded to one of a few numbers
of tokens. The padding's K and V go to the null block, and attention does not see it.
Source: breakable graphs in SGLang, https://github.com/sgl-project/sglang/pull/19102
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoengine.backends.device import Compute, Decodes, Forward
from nanoengine.backends.kv_cache import KVCache
from nanoengine.backends.step_inputs import ModelInputs, Send, pad, send_inputs


def token_counts(largest: int) -> list[int]:
    """Return the numbers of tokens that steps are padded to: steps of 64, later four to an octave.

    >>> token_counts(1200)
    [64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1200]
    """
    counts, count = list[int](), 64
    while count < largest:
        counts.append(count)
        count += max(64, 1 << count.bit_length() - 3)
    return [*counts, largest]


def pad_tokens(inputs: ModelInputs[np.ndarray], num_tokens: int) -> ModelInputs[np.ndarray]:
    """Pad a batch to a number of tokens. The additional tokens are at position 0 of the null block."""
    ids, positions = pad(inputs.input_ids, num_tokens), pad(inputs.positions, num_tokens)
    slots = pad(inputs.metadata.slot_mapping, num_tokens)
    # All keys are read from the cache, where the padding's are not.
    metadata = inputs.metadata._replace(slot_mapping=slots, has_cached_tokens=True)
    return inputs._replace(input_ids=ids, positions=positions, metadata=metadata)


class Recorder:
    """Captures what is launched between `begin` and `end`. The graphs of one recorder share memory."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._pool = stream, torch.cuda.graph_pool_handle()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Launch everything on the stream for captures."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def begin(self) -> None:
        """Begin a capture. Other threads, such as another engine's, may use the GPU meanwhile."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Callable[[], None]:
        """End the capture, and return a function that replays it."""
        self._graph.capture_end()
        return self._graph.replay


class Step(NamedTuple):
    """Holds a piece and the call of attention after it."""

    replay: Callable[[], None]
    tensors: tuple[Tensor, ...]  # `out` and q, and k and v if the piece does not write them
    cache: KVCache
    settings: dict[str, Any]


class Cut:
    """Stands in for attention while a model is captured: each call ends a piece, and begins the next one.

    All layers of all sizes share the tensors that attention reads and writes: those of a layer are used up
    before the next layer's are written.
    """

    def __init__(self, attention: Any, largest: int, shared: dict[Any, Tensor], recorder: Any = None) -> None:
        self.attention, self.largest, self.shared = attention, largest, shared
        self.recorder = recorder  # None: only allocate
        self.steps: list[Step] = []

    def memory(self, name: str, like: Tensor, dim: int) -> Tensor:
        """Return shared memory for len(like) tokens. Rows that were never written are zeros."""
        key = name, like.shape[1], dim
        if key not in self.shared:
            self.shared[key] = like.new_zeros(self.largest, like.shape[1], dim)
        return self.shared[key][: len(like)]

    def place_for(self, q: Tensor, cache: KVCache) -> tuple[Tensor, Tensor] | None:
        """See `PagedAttention`."""
        where = self.attention.place_for(q, cache)
        return where and (self.memory("q", q, q.shape[2]), where[1])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, **settings: Any) -> Tensor:
        """Return the memory that attention will have written to."""
        held = [q]
        if k is not cache.k:  # a model whose kernels do not know about places
            pairs = zip("qkv", (q, k, v), strict=True)
            held = [self.memory(name, x, x.shape[2]).copy_(x) for name, x in pairs]
        out = self.memory("out", q, v.shape[-1])
        if self.recorder is not None:
            self.steps.append(Step(self.recorder.end(), (out, *held), cache, settings))
            self.recorder.begin()
        return out


class PromptGraphs(Forward):
    """Replays the steps that `decodes` has no graph for: with prompts, or with many sequences."""

    def __init__(self, decodes: Forward, plan: Decodes, recorder: Any, send: Send) -> None:
        start = time.perf_counter()
        self.decodes, self.counts, self.num_tokens = decodes, token_counts(plan.max_num_tokens), 0
        self.shared: dict[Any, Tensor] = {}
        self.plans: dict[int, tuple[list[Step], Callable[[], None], Tensor]] = {}
        for count in reversed(self.counts):  # the smaller ones fit into the memory of the largest
            inputs = send_inputs(pad_tokens(plan.inputs, count), send)

            def capture(ids: Tensor, positions: Tensor, caches: Any, attention: Any) -> Tensor:
                # Once without a recorder: one-time setup must not be captured.
                plan.model(ids, positions, caches, Cut(attention, self.counts[-1], self.shared))
                cut = Cut(attention, self.counts[-1], self.shared, recorder)
                recorder.begin()
                try:
                    hidden: Tensor = plan.model(ids, positions, caches, cut)
                finally:
                    last = recorder.end()
                self.plans[len(ids)] = cut.steps, last, hidden
                return hidden

            with recorder.capturing():
                plan.compute(inputs, capture)
        seconds = time.perf_counter() - start
        super().__init__(f"{decodes.remark}, prompts in {len(self.plans)} sizes ({seconds:.1f} s)")

    def pad(self, inputs: ModelInputs[np.ndarray]) -> ModelInputs[np.ndarray]:
        self.num_tokens = len(inputs.input_ids)
        if self.decodes.captures(inputs) or self.num_tokens > self.counts[-1]:
            return self.decodes.pad(inputs)
        return pad_tokens(inputs, self.counts[bisect.bisect_left(self.counts, self.num_tokens)])

    def __call__(self, compute: Compute, inputs: ModelInputs[Tensor]) -> Tensor:
        """See the base class. The hidden states are valid until the next call."""
        plan = self.plans.get(len(inputs.input_ids))
        if plan is None or self.decodes.captures(inputs):
            return self.decodes(compute, inputs)
        steps, replay_last, hidden = plan
        num_tokens = self.num_tokens

        def replay(ids: Tensor, positions: Tensor, caches: Any, attention: Any) -> Tensor:
            for replay_piece, tensors, cache, settings in steps:
                replay_piece()
                out, q = tensors[0][:num_tokens], tensors[1][:num_tokens]
                k, v = tensors[2:] or (cache.k, cache.v)  # K and V of the padding go to the null block
                result = attention(q, k, v, cache, out=out, **settings)
                if result is not out:
                    out.copy_(result)
            replay_last()
            return hidden

        return compute(inputs, replay)
