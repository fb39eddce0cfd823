"""Measures the host side: the scheduler and block manager, then whole steps without the device's work."""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import nanoengine
from nanoengine.backends import cuda
from nanoengine.backends.device import Forward
from nanoengine.config import EngineConfig
from nanoengine.engine import BlockManager, Scheduler, Sequence
from nanoengine.llm_engine import LLMEngine
from nanoengine.sampling import sample_rows
from nanoengine.sampling_params import RequestOutputKind, SamplingParams

BLOCK_SIZE = 16


def median_us(run: Callable[[], float], repeats: int) -> tuple[float, float, float]:
    """Return the median, minimum and maximum of the seconds that `run` returns, in microseconds."""
    times = sorted(run() * 1e6 for _ in range(repeats))
    return statistics.median(times), times[0], times[-1]


def decode_step_us(num_seqs: int, num_blocks: int, repeats: int) -> tuple[float, float, float]:
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
    return median_us(lambda: sum(step() for _ in range(BLOCK_SIZE)) / BLOCK_SIZE, repeats)


def admission_us(num_blocks: int, repeats: int) -> tuple[float, float, float]:
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
    return median_us(lambda: admit([rng.randrange(10**6) for _ in range(32)]), repeats * 20)


# ---- Whole steps ---------------------------------------------------------------------------------


class NoForward(Forward):
    """Replaces a GPU's forward pass: pads batches of decodes as for a CUDA graph, and computes nothing."""

    def __init__(self, table_width: int, block_size: int) -> None:
        super().__init__()
        self.table_width, self.block_size = table_width, block_size

    def pad(self, inputs: Any) -> Any:
        """Pad a batch of decodes as a GPU does, for a graph with room for exactly these sequences."""
        num_seqs = len(inputs.metadata.seq_lens)
        if len(inputs.input_ids) != num_seqs:
            return inputs
        return cuda.pad_decodes(inputs, num_seqs, self.table_width, self.block_size)

    def __call__(self, compute: Any, inputs: Any) -> Tensor:
        """Return meaningless hidden states, (T, 1)."""
        return torch.empty(len(inputs.input_ids), 1)


@contextmanager
def engine_without_device(num_seqs: int, max_model_len: int = 1024) -> Iterator[LLMEngine]:
    """Yield an engine that is set up as on a GPU, with a stubbed forward pass and stubbed sampling.

    The engine runs at most `num_seqs` sequences. It samples the tokens of a text, some of which end inside a
    character.
    """
    block_size = 256
    with redirect_stderr(StringIO()):  # hides the engine's startup message
        engine = LLMEngine(
            EngineConfig(
                model=str(Path(nanoengine.__file__).parent / "demo"),
                max_num_seqs=num_seqs,
                max_model_len=max_model_len,
                max_num_batched_tokens=8192,
                block_size=block_size,
                num_kv_blocks=num_seqs * max_model_len // block_size,
                async_scheduling=True,
            )
        )
    runner: Any = engine.runner
    text = "A cat sat on the mat, and 3 dogs came by: naïve, 日本 ones. "
    written = engine.checkpoint.tokenizer(text, add_special_tokens=False).input_ids
    tokens = torch.tensor(written * (1 + (num_seqs + len(written)) // len(written)))
    logits, step = torch.zeros(num_seqs, 1), [0]

    def draw(logits: Tensor, metadata: Any) -> tuple[Tensor, Tensor]:
        step[0] += 1
        return tokens[step[0] % len(written) :][: len(logits)], logits[:, 0]

    runner.forward = NoForward(max_model_len // block_size, block_size)
    runner.model.compute_logits = lambda hidden: logits[: len(hidden)]
    runner.sample = partial(sample_rows, draw=draw)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    with patch.multiple(cuda, host_memory=plain_memory, new_event=lambda: event):  # no GPU copies anything
        runner.device.send = cuda.Staging(1 << 20, torch.device("cpu")).send
    try:
        yield engine
    finally:
        engine.close()


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
    "FINAL_ONLY": {"output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False},
    "FINAL_ONLY, text": {"output_kind": RequestOutputKind.FINAL_ONLY},
    "DELTA": {"output_kind": RequestOutputKind.DELTA, "detokenize": False},
    "DELTA, text": {"output_kind": RequestOutputKind.DELTA},
}
PHASES = ("schedule", "inputs", "forward", "sample", "update")


def whole_step_ms(kind: str, num_seqs: int, repeats: int) -> tuple[list[float], dict[str, float]]:
    """Return the milliseconds per decode step of `repeats` runs, sorted, and the mean of each phase."""
    times = []
    with engine_without_device(num_seqs) as engine:
        start_decodes(engine, num_seqs, 512, **KINDS[kind])
        seconds = engine.runner.stopwatch.seconds
        before, num_steps = dict(seconds), 16
        for _ in range(min(repeats, (1024 - 512) // num_steps - 1)):
            start = time.perf_counter()
            for _ in range(num_steps):
                engine.step()
            times.append((time.perf_counter() - start) / num_steps * 1e3)
        phases = {
            phase: (seconds[phase] - before[phase]) / (num_steps * len(times)) * 1e3 for phase in PHASES
        }
    return sorted(times), phases


def bench_steps(repeats: int, num_seqs: int = 256) -> dict[str, Any]:
    """Measure whole steps for each kind of output, print a table and return the figures."""
    print(f"{f'ms a step, {num_seqs} decode':24} median     min     max   of which {'  '.join(PHASES)}")
    report = {}
    for kind in KINDS:
        times, phases = whole_step_ms(kind, num_seqs, repeats)
        median = statistics.median(times)
        each = "  ".join(f"{phases[phase]:{len(phase)}.2f}" for phase in PHASES)
        print(f"{kind:24} {median:6.2f}  {times[0]:6.2f}  {times[-1]:6.2f}            {each}")
        report[kind] = {"median": round(median, 3), "min": round(times[0], 3), "max": round(times[-1], 3)}
    return report


def bench_scheduler(repeats: int) -> dict[str, dict[str, float]]:
    """Measure the scheduler and whole steps, print tables and return the medians."""
    sizes = [(1, 1_000), (16, 1_000), (64, 10_000), (256, 20_000), (256, 100_000), (1024, 100_000)]
    steps = {
        f"{seqs} running, {blocks} blocks": (seqs, decode_step_us(seqs, blocks, repeats))
        for seqs, blocks in sizes
    }
    admissions = {f"{blocks} blocks": admission_us(blocks, repeats) for blocks in (1_000, 10_000, 100_000)}
    print(f"{'µs':48}   median      min      max   per sequence")
    for key, (seqs, (median, least, most)) in steps.items():
        print(f"{'decode step, ' + key:48} {median:8.2f} {least:8.2f} {most:8.2f} {median / seqs:8.3f}")
    for key, (median, least, most) in admissions.items():
        print(f"{'admit 544 tokens, 512 cached, ' + key:48} {median:8.2f} {least:8.2f} {most:8.2f}")
    steps_ms = bench_steps(repeats)
    return {
        "steps_ms": steps_ms,
        "decode_us": {key: round(figures[0], 3) for key, (_, figures) in steps.items()},
        "decode_us_per_sequence": {
            key: round(figures[0] / seqs, 3) for key, (seqs, figures) in steps.items()
        },
        "admission_us": {key: round(figures[0], 3) for key, figures in admissions.items()},
    }
