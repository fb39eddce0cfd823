"""Measure the engine. Nothing is downloaded; the last line printed is one JSON object.

python bench.py --what scheduler    # the host side alone: scheduler and block manager, no model
"""

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable

from nanoengine.engine import BlockManager, Scheduler, Sequence
from nanoengine.sampling import SamplingParams

BLOCK_SIZE = 16


def median_us(run: Callable[[], float], repeats: int) -> tuple[float, float, float]:
    """Median, least and most of what `run` measured, in microseconds."""
    times = sorted(run() * 1e6 for _ in range(repeats))
    return statistics.median(times), times[0], times[-1]


def decode_step_us(num_seqs: int, num_blocks: int, repeats: int) -> tuple[float, float, float]:
    """Schedule and update one decode step, per running sequence."""
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
    return median_us(lambda: sum(step() for _ in range(BLOCK_SIZE)) / (BLOCK_SIZE * num_seqs), repeats)


def admission_us(num_blocks: int, repeats: int) -> tuple[float, float, float]:
    """Admit a 544-token prompt of which 512 tokens are cached: hash, look up, allocate."""
    manager = BlockManager(num_blocks, BLOCK_SIZE)
    rng = random.Random(0)
    shared = [rng.randrange(10**6) for _ in range(512)]

    def admit(tail: list[int]) -> float:
        seq = Sequence(0, shared + tail, SamplingParams())
        start = time.perf_counter()
        hits = manager.find_prefix(seq)
        assert manager.can_allocate(seq, hits)
        manager.allocate(seq, hits)
        elapsed = time.perf_counter() - start
        manager.cache_full_blocks(seq, seq.num_tokens)
        manager.free(seq)
        return elapsed

    admit([0] * 32)
    return median_us(lambda: admit([rng.randrange(10**6) for _ in range(32)]), repeats * 20)


def bench_scheduler(repeats: int) -> dict[str, dict[str, float]]:
    """Print a table and return the medians."""
    results: dict[str, dict[str, float]] = {"decode_us_per_sequence": {}, "admission_us": {}}
    rows = [
        (f"decode step, {seqs:4d} running, {blocks:6d} blocks, per sequence", "decode_us_per_sequence",
         f"{seqs} running, {blocks} blocks", decode_step_us(seqs, blocks, repeats))
        for seqs, blocks in [(1, 10_000), (16, 10_000), (256, 20_000), (256, 100_000), (1024, 100_000)]
    ]  # fmt: skip
    rows += [
        (f"admit 544 tokens, 512 cached, {blocks:6d} blocks", "admission_us", f"{blocks} blocks",
         admission_us(blocks, repeats))
        for blocks in (1_000, 10_000, 100_000)
    ]  # fmt: skip
    print(f"{'':58}  median     min     max  (µs)")
    for label, group, key, (median, least, most) in rows:
        print(f"{label:58}  {median:6.2f}  {least:6.2f}  {most:6.2f}")
        results[group][key] = round(median, 3)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=["scheduler"], default="scheduler")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    versions = {"python": platform.python_version(), "machine": platform.machine()}
    print(json.dumps({"what": args.what, **versions, **bench_scheduler(args.repeats)}))


if __name__ == "__main__":
    main()
