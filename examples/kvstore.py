"""Time a long prompt's first token: computed, from a KV store in memory and on disk, from the prefix cache.

python -m examples.kvstore [TOKENS [RUNS]]    # Qwen3-0.6B's shape with random weights, in bfloat16

Each row but the last has an engine of its own, so that only the store can hold K and V from before.
"""

import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.models import write_shape
from nanoengine import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)


def seconds_to_first_token(model: str, num_tokens: int, run: int) -> dict[str, float]:
    """Return the seconds of each row, for a new prompt. Raises RuntimeError if the answers differ."""
    rng, rows, answers = random.Random(run), dict[str, float](), set[int]()
    warm_up, prompt = ([rng.randrange(4000) for _ in range(length)] for length in (64, num_tokens))
    make = tempfile.TemporaryDirectory
    with make(dir="/dev/shm") as memory, make(dir=".") as disk:
        for row, store in ("computed", memory), ("saved to disk", disk), ("memory", memory), ("disk", disk):
            settings: dict[str, Any] = {
                "load_format": "dummy",
                "max_model_len": num_tokens + 64,
                "kv_store": store,
            }
            with LLM(model, **settings) as llm:
                llm.generate([warm_up], PARAMS, use_tqdm=False)
                os.sync()
                for file in Path(disk).rglob("*.safetensors"):  # drop it from the page cache
                    with file.open("rb") as stream:
                        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                for name in (row, "prefix cache") if row == "memory" else (row,):
                    start = time.perf_counter()
                    (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
                    rows[name] = time.perf_counter() - start
                    answers.update(output.outputs[0].token_ids)
    if len(answers) > 1:
        raise RuntimeError("the answers differ")
    return rows


def main(num_tokens: int = 4096, num_runs: int = 3) -> None:
    with tempfile.TemporaryDirectory() as model:
        write_shape("qwen3-0.6b", model, dtype="bfloat16")
        runs = [seconds_to_first_token(model, num_tokens, run) for run in range(num_runs)]
    for name in ("computed", "memory", "disk", "prefix cache"):
        seconds = [run[name] for run in runs]
        print(f"{name:12} {statistics.median(seconds):7.3f} s  {min(seconds):.3f} to {max(seconds):.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
