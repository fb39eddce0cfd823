"""The receipt of a run: where its seconds went, beside the least that each item could take on this machine.

    llm.receipt()                     # from now on, runs are recorded
    llm.generate(...)
    print(show(llm.receipt()))

A run begins with the first request of an idle engine, and ends with its last step. Its items, for steps with
prompt tokens (and any decodes in them), and for steps of decodes alone:

    start      from the first request to the first step          schedule, inputs, update   the host's work
    waiting    between steps: the caller's time, and outputs      launch     the rest of the forward pass
    weights    products that take longer to read than to compute  sampling   and waiting for the tokens
    products   the other products                                 kv         attention

The host's clock measures the steps and the model's layers. A layer may be a single kernel call. So its
seconds are divided among weights, products and kv, in proportion to their floors. On a GPU, each forward pass
is waited for, and all of it is divided. A floor is the bytes or the operations of the run's own batches,
whichever take longer at the machine's measured peak.
"""

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from nanoengine.assembly_types import Started
from nanoengine.engine import EngineCore, ScheduledBatch
from nanoengine.extensions.roofline import measure_limits
from nanoengine.timing import Stopwatch

NAMES = "start", "waiting", "schedule", "inputs", "launch", "weights", "products", "kv", "sampling", "update"
FIGURES = "seconds", "floor_seconds", "bytes", "operations"
# A phase of the stopwatch -> the item of its seconds, and of the seconds since the phase before it
ITEMS = {"schedule": ("schedule", "waiting"), "inputs": ("inputs", "launch"), "forward": ("launch", "launch")}
ITEMS |= {"sample": ("sampling", "launch"), "update": ("update", "update")}


class Work(NamedTuple):
    """Describes what a step computes."""

    phase: str  # "prompts" or "decodes"
    num_tokens: int
    num_samples: int
    kv_bytes: int
    kv_operations: int


class Recorder(Stopwatch):
    """Records the last run of an engine. It takes the place of the runner's stopwatch."""

    def __init__(self, core: EngineCore, started: Started) -> None:
        super().__init__()
        runner, checkpoint = core.runner, started.opened.checkpoint
        self.scheduler, self.tell_before = core.scheduler, core.scheduler.tell
        self.seconds, self.device = runner.stopwatch.seconds, runner.device.device  # its totals go on
        self.dtype, self.specs = started.loaded.dtype, started.loaded.kv_specs
        self.num_heads = getattr(checkpoint.hf_config, "num_attention_heads", 0)
        self.vocab_size = checkpoint.vocab_size
        self.layers, self.head = Counter[str](), Counter[str]()  # their weights, in numbers and in bytes
        for module in parts_of(runner.model):
            count_weights(module, self.layers, self.head, self.vocab_size)
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)
        self.limits: dict[str, Any] = {}
        self._begin()
        runner.stopwatch = self
        self.scheduler.observe(self._note)

    def _begin(self) -> None:
        self.items: defaultdict[tuple[str, str], float] = defaultdict(float)  # (name, phase) -> seconds
        self.steps: list[tuple[Work, float]] = []  # with the seconds of its layers
        self.layer_seconds = self.gap = 0.0
        self.work = Work("prompts", 0, 0, 0, 0)

    def _enter(self, *_: Any) -> None:
        self.entered = time.perf_counter()

    def _leave(self, *_: Any) -> None:
        self.layer_seconds += time.perf_counter() - self.entered

    def _note(self, event: str, *details: Any) -> None:
        self.tell_before(event, *details)
        if event == "added" and len(self.scheduler.waiting) == 1 and not self.scheduler.running:
            self._begin()
            self._started = time.perf_counter()
        elif event == "scheduled" and details[0].chunks:
            self.work = self._work_of(details[0])

    def _work_of(self, batch: ScheduledBatch) -> Work:
        is_prompt = any(start < seq.num_prompt_tokens for seq, start, *_ in batch.chunks)
        num_bytes = operations = 0
        for spec in self.specs:
            per_pair = 2 * self.num_heads * (spec.k_head_dim + spec.v_head_dim)
            for _, start, end, *_ in batch.chunks:
                seen = min(end, (spec.window or end) + end - start - 1)
                num_bytes += spec.bytes_per_token * (seen + end - start)  # read, and written
                operations += per_pair * sum(min(i + 1, spec.window or end) for i in range(start, end))
        phase = "prompts" if is_prompt else "decodes"
        return Work(phase, batch.num_tokens, len(batch.sampled_seqs), num_bytes, operations)

    def start(self) -> None:
        """Begin a phase, and keep the seconds since the last one."""
        now = time.perf_counter()
        self.gap = getattr(self, "gap", 0.0) + now - getattr(self, "_started", now)
        self._started = now

    def lap(self, phase: str) -> None:
        """End a phase, and record its seconds."""
        if phase == "forward" and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        before, kind = self._started, self.work.phase
        super().lap(phase)
        took, (own, of_gap) = self._started - before, ITEMS[phase]
        is_first = of_gap == "waiting" and not any(name == "schedule" for name, _ in self.items)
        self.items["start" if is_first else of_gap, kind] += self.gap
        self.gap = 0.0
        if phase == "forward":
            in_layers = took if self.device.type == "cuda" else self.layer_seconds
            is_more = bool(self.steps) and self.steps[-1][0] is self.work  # logits of more rows
            self.steps.append((self.work, in_layers + (self.steps.pop()[1] if is_more else 0.0)))
            self.layer_seconds = 0.0
            took -= in_layers
        self.items[own, kind] += took

    def receipt(self) -> dict[str, Any]:
        """Return the receipt of the last run: with the measured peaks of the machine."""
        if self.steps and not self.limits:
            dtype = str(self.dtype).removeprefix("torch.")
            self.limits = measure_limits(dtype, self.device.type)
        rows: defaultdict[tuple[str, str], dict[str, float]]
        rows = defaultdict(lambda: dict.fromkeys(FIGURES, 0.0))
        for place, seconds in self.items.items():
            rows[place]["seconds"] += seconds
        for work, seconds in self.steps:
            parts = list(self._parts_of(work))
            least = sum(floor for name, floor, *_ in parts if name != "sampling") or 1.0
            for name, floor, num_bytes, operations in parts:
                share = 0.0 if name == "sampling" else seconds * floor / least
                for figure, value in zip(FIGURES, (share, floor, num_bytes, operations), strict=True):
                    rows[name, work.phase][figure] += value
        places = itertools.product(("prompts", "decodes"), NAMES)
        items = [{"name": x, "phase": phase, **rows[x, phase]} for phase, x in places if (x, phase) in rows]
        return {"seconds": sum(rows[place]["seconds"] for place in rows), "items": items}

    def _parts_of(self, work: Work) -> Iterator[tuple[str, float, int, int]]:
        """Yield the name, floor, bytes and operations of each part of a step."""
        bandwidth, rate = self.limits["bandwidth"], max(self.limits["flops"].values())
        for weights, rows in (self.layers, work.num_tokens), (self.head, work.num_samples):
            if rows:
                num_bytes, operations = weights["bytes"], 2 * rows * weights["numbers"]
                read, computed = num_bytes / bandwidth, operations / rate
                name = "weights" if read > computed else "products"
                yield name, max(read, computed), num_bytes, operations
        floor = max(work.kv_bytes / bandwidth, work.kv_operations / rate)
        yield "kv", floor, work.kv_bytes, work.kv_operations
        num_logits = work.num_samples * self.vocab_size
        num_bytes = num_logits * self.dtype.itemsize
        yield "sampling", num_bytes / bandwidth, num_bytes, num_logits


def recorder_of(core: EngineCore, started: Started) -> Recorder:
    """Return the recorder of an engine. The first call makes it."""
    stopwatch = core.runner.stopwatch
    return stopwatch if isinstance(stopwatch, Recorder) else Recorder(core, started)


def parts_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a model's layers, and its linear layers outside of them: the output's."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif hasattr(child, "out_features"):
            yield child
        else:
            yield from parts_of(child)


def count_weights(module: nn.Module, layers: Counter[str], head: Counter[str], vocab_size: int) -> None:
    """Add a layer's weights, in numbers and in bytes, to those of the layers or to those of the head."""
    part: Any
    for part in module.modules():
        if size := getattr(part, "out_features", 0):
            weight = part.packed if hasattr(part, "packed") else part.weight
            target = head if part is module and size >= vocab_size else layers
            target.update(numbers=size * part.in_features, bytes=weight.numel() * weight.element_size())


def show(receipt: dict[str, Any]) -> str:
    """Return a receipt as a table that fits on a screen."""
    lines = [f"{'':10}{'':10}{'seconds':>10}{'share':>8}{'floor, s':>10}{'GB':>10}{'GFLOP':>10}"]
    total = receipt["seconds"] or 1.0
    for item in receipt["items"]:
        counts = [item["bytes"] / 1e9, item["operations"] / 1e9]
        figures = f"{item['seconds']:10.3f}{item['seconds'] / total:8.1%}{item['floor_seconds']:10.3f}"
        numbers = "".join(f"{one:10.2f}" for one in counts)
        lines.append(f"{item['phase']:10}{item['name']:10}{figures}{numbers}")
    floor = sum(item["floor_seconds"] for item in receipt["items"])
    return "\n".join([*lines, f"{'':10}{'total':10}{receipt['seconds']:10.3f}{1:8.0%}{floor:10.3f}"])
