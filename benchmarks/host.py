"""The host side alone: scheduler and block manager, no model."""

import random
import statistics
import time
from collections.abc import Callable

from nanoengine.engine import BlockManager, Scheduler, Sequence
from nanoengine.sampling_params import SamplingParams

BLOCK_SIZE = 16


def median_us(run: Callable[[], float], repeats: int) -> tuple[float, float, float]:
    """Median, least and most of what `run` measured, in microseconds."""
    times = sorted(run() * 1e6 for _ in range(repeats))
    return statistics.median(times), times[0], times[-1]


def decode_step_us(num_seqs: int, num_blocks: int, repeats: int) -> tuple[float, float, float]:
    """Schedule and update one decode step."""
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
    # Over whole blocks, so that growth, hashing and registering are in it at their true share.
    return median_us(lambda: sum(step() for _ in range(BLOCK_SIZE)) / BLOCK_SIZE, repeats)


def admission_us(num_blocks: int, repeats: int) -> tuple[float, float, float]:
    """Admit a 544-token prompt of which 512 tokens are cached: hash, look up, allocate."""
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


def bench_scheduler(repeats: int) -> dict[str, dict[str, float]]:
    """Print a table and return the medians."""
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
    return {
        "decode_us": {key: round(figures[0], 3) for key, (_, figures) in steps.items()},
        "decode_us_per_sequence": {
            key: round(figures[0] / seqs, 3) for key, (seqs, figures) in steps.items()
        },
        "admission_us": {key: round(figures[0], 3) for key, figures in admissions.items()},
    }
