"""Measure the host side: the scheduler and block manager, then whole steps without the device's work.

python -m benchmarks.host [REPEATS]    # the last line printed is one JSON object
"""

import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from io import StringIO
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from nanoengine.backends import cuda
from nanoengine.backends.device import Forward
from nanoengine.cli.terminal import table
from nanoengine.config import EngineConfig
from nanoengine.engine import BlockManager, Scheduler, Sequence
from nanoengine.llm_engine import LLMEngine
from nanoengine.sampling.sampler import sample_rows
from nanoengine.sampling_params import RequestOutputKind, SamplingParams

BLOCK_SIZE = 16
# Running sequences, and blocks of the pool; and the sequences of whole steps.
SIZES = [(1, 1_000), (16, 1_000), (64, 10_000), (256, 20_000), (256, 100_000), (1024, 100_000)]
NUM_SEQS = 256


def spread(times: Iterable[float]) -> dict[str, float]:
    """Return the median, minimum and maximum."""
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


def decode_step_us(num_seqs: int, num_blocks: int, repeats: int) -> dict[str, float]:
    """Measure scheduling and updating one decode step."""
    manager = BlockManager(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(manager, max_num_seqs=num_seqs, max_num_batched_tokens=16 * num_seqs)
    rng = random.Random(0)
    for seq_id in range(num_seqs):
        prompt = [rng.randrange(10**6) for _ in range(16)]
        scheduler.add(Sequence(seq_id, prompt, SamplingParams(max_tokens=None), stop_ids=frozenset({1, 2})))

    def step() -> float:
        start = time.perf_counter()
        batch = scheduler.schedule()
        scheduler.update(batch, [5] * num_seqs)
        return time.perf_counter() - start

    step()  # admits all prompts
    # Averaged over whole blocks, so that growth, hashing and registration are included at their true share.
    return spread([1e6 * sum(step() for _ in range(BLOCK_SIZE)) / BLOCK_SIZE for _ in range(repeats)])


def admission_us(num_blocks: int, repeats: int) -> dict[str, float]:
    """Measure admitting a 544-token prompt of which 512 tokens are cached: hash, look up, allocate."""
    manager = BlockManager(num_blocks, BLOCK_SIZE)
    rng = random.Random(0)
    shared = [rng.randrange(10**6) for _ in range(512)]

    def admit(tail: list[int]) -> float:
        seq = Sequence(0, shared + tail, SamplingParams())
        start = time.perf_counter()
        assert manager.allocate(seq)
        elapsed = time.perf_counter() - start
        manager.register_full_blocks(seq, seq.num_tokens)
        manager.free(seq)
        return elapsed

    admit([0] * 32)
    tails = [[rng.randrange(10**6) for _ in range(32)] for _ in range(repeats * 20)]
    return spread([1e6 * admit(tail) for tail in tails])


# ---- Whole steps ---------------------------------------------------------------------------------


class NoForward(Forward):
    """Replaces a GPU's forward pass: pads batches of decodes as for a CUDA graph, and computes nothing."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes = sizes  # blocks in a table, tokens in a block

    def pad(self, inputs: Any) -> Any:
        """Pad a batch of decodes as a GPU does, for a graph with room for exactly these sequences."""
        num_seqs = len(inputs.metadata.seq_lens)
        is_decode = len(inputs.input_ids) == num_seqs
        return cuda.pad_decodes(inputs, num_seqs, *self.sizes) if is_decode else inputs

    def __call__(self, compute: Any, inputs: Any) -> Tensor:
        """Return meaningless hidden states, (T, 1)."""
        return torch.empty(len(inputs.input_ids), 1)


@contextmanager
def engine_without_device(num_seqs: int, max_model_len: int = 1024) -> Iterator[LLMEngine]:
    """Yield an engine that is set up as on a GPU, with a stubbed forward pass and stubbed sampling."""
    block_size = 256
    settings: dict[str, Any] = {"max_num_seqs": num_seqs, "max_model_len": max_model_len}
    settings |= {"block_size": block_size, "num_kv_blocks": num_seqs * max_model_len // block_size}
    with redirect_stderr(StringIO()):  # hides the engine's startup message
        config = EngineConfig(model="demo", max_num_batched_tokens=8192, async_scheduling=True, **settings)
        engine = LLMEngine(config)
    stub_sampling(engine, num_seqs)
    runner: Any = engine.runner
    runner.forward = NoForward(max_model_len // block_size, block_size)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    with (
        patch.object(cuda, "pinned_memory", plain_memory),
        patch("torch.cuda.Event", lambda: event),
    ):  # no GPU
        runner.device.send = cuda.Staging(1 << 20, torch.device("cpu")).send
    try:
        yield engine
    finally:
        engine.close()


def stub_sampling(engine: LLMEngine, num_seqs: int) -> None:
    """Let an engine's next tokens be those of a text, some of which end inside a character."""
    runner: Any = engine.runner
    text = "A cat sat on the mat, and 3 dogs came by: naïve, 日本 ones. "
    written = engine.checkpoint.tokenizer(text, add_special_tokens=False).input_ids
    tokens = torch.tensor(written * (1 + (num_seqs + len(written)) // len(written)))
    logits, steps = torch.zeros(num_seqs, engine.checkpoint.vocab_size), itertools.count(1)

    def draw(logits: Tensor, metadata: Any) -> tuple[Tensor, Tensor]:
        return tokens[next(steps) % len(written) :][: len(logits)], logits[:, 0]

    runner.model.compute_logits = lambda hidden: logits[: len(hidden)]
    runner.sample = partial(sample_rows, draw=draw)


def plain_memory(shape: list[int], dtype: torch.dtype) -> tuple[Tensor, Any]:
    """Allocate memory that is not pinned, which PyTorch can do without a GPU."""
    memory = torch.empty(*shape, dtype=dtype)
    return memory, memory.numpy()


def start_decodes(
    engine: LLMEngine, num_seqs: int, num_prompt_tokens: int, first: int = 0, **settings: Any
) -> None:
    """Add requests, named by numbers from `first` on, and step until all of them decode."""
    params = SamplingParams(max_tokens=None, **settings)
    rng = random.Random(0)
    for i in range(first, first + num_seqs):
        prompt = [rng.randrange(100, 400) for _ in range(num_prompt_tokens)]
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    while engine.scheduler.waiting:
        engine.step()
    for _ in range(3):  # finish the last prompts and the steps in flight
        engine.step()


KINDS: dict[str, dict[str, Any]] = {
    f"{kind.name}{text}": {"output_kind": kind, "detokenize": bool(text)}
    for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA)
    for text in ("", ", text")
}
# The CPU also edits the logits, which a GPU would do.
KINDS["FINAL_ONLY, repetition_penalty"] = {**KINDS["FINAL_ONLY"], "repetition_penalty": 1.1}


def whole_steps(kind: str, num_seqs: int, repeats: int) -> dict[str, float]:
    """Return the milliseconds of a decode step, of `repeats` runs, and the mean of each phase."""
    times, num_steps = [], 16
    with engine_without_device(num_seqs) as engine:
        start_decodes(engine, num_seqs, 512, **KINDS[kind])
        seconds = engine.runner.stopwatch.seconds
        before = dict(seconds)
        for _ in range(min(repeats, (1024 - 512) // num_steps - 1)):
            start = time.perf_counter()
            for _ in range(num_steps):
                engine.step()
            times.append((time.perf_counter() - start) / num_steps * 1e3)
        count = num_steps * len(times)
        phases = {phase: (seconds[phase] - before[phase]) / count * 1e3 for phase in before}
    return spread(times) | phases


def bench_scheduler(repeats: int) -> dict[str, Any]:
    """Measure the scheduler and whole steps, print tables and return the figures."""
    report: dict[str, Any] = {"decode_us": {}, "admission_us": {}, "steps_ms": {}}
    for num_seqs, num_blocks in SIZES:
        figures = decode_step_us(num_seqs, num_blocks, repeats)
        figures["per sequence"] = figures["median"] / num_seqs
        report["decode_us"][f"{num_seqs} running, {num_blocks} blocks"] = figures
    for num_blocks in sorted({num_blocks for _, num_blocks in SIZES}):
        report["admission_us"][f"{num_blocks} blocks"] = admission_us(num_blocks, repeats)
    for kind in KINDS:
        report["steps_ms"][kind] = whole_steps(kind, NUM_SEQS, repeats)
    titles = "decode step, µs", "admit 544 tokens, 512 cached, µs", f"whole step of {NUM_SEQS} decodes, ms"
    for title, rows in zip(titles, report.values(), strict=True):
        lines = [[name, *(f"{value:.2f}" for value in row.values())] for name, row in rows.items()]
        print(f"\n{table([title, *next(iter(rows.values()))], lines)}\n")
    return report


if __name__ == "__main__":
    print(json.dumps(bench_scheduler(int(sys.argv[1]) if len(sys.argv) > 1 else 20)))
