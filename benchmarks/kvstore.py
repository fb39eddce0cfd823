"""Measure the time to a long prompt's first token: cold, from a KV store, and from the prefix cache.

python -m benchmarks.kvstore                          # Qwen3-0.6B's shape, a prompt of 4096 tokens
python -m benchmarks.kvstore --shape tiny --prompt 512 --disk /var/tmp

Each run has a new random prompt and new engines, so that only a store can hold K and V from before:

    cold          the prompt is computed, and saved to the store in the background
    memory        another engine loads from a store in /dev/shm
    disk          another engine loads from a store on disk, after its files were dropped from the page cache
    prefix cache  the same engine again: K and V are still in its blocks

The last line printed is one JSON object.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from nanoengine import LLM, SamplingParams
from nanoengine.apps.workloads import SHAPES

ROWS = ("cold", "memory", "disk", "prefix cache")


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int, list[int]]:
    """Return the seconds to the first token, the number of cached prompt tokens, and the answer."""
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
    start = time.perf_counter()
    output = llm.generate([prompt], params, use_tqdm=False)[0]
    return time.perf_counter() - start, output.num_cached_tokens or 0, output.outputs[0].token_ids


def drop_from_page_cache(directory: str) -> int:
    """Drop the store's files from the page cache, so that reads hit the disk. Returns the files' bytes."""
    os.sync()
    num_bytes = 0
    for file in Path(directory).rglob("*.safetensors"):
        with open(file, "rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            num_bytes += os.fstat(stream.fileno()).st_size
    return num_bytes


def measure(model: str, settings: dict[str, Any], length: int, memory: str, disk: str, run: int) -> Any:
    """Measure one run: the seconds of each row, the bytes in a store, and whether all answers agree."""
    rng = random.Random(run)
    warm_up, prompt = ([rng.randrange(1000) for _ in range(n)] for n in (64, length))
    seconds, cached, answers = {}, {}, []

    def take(row: str, llm: LLM) -> None:
        seconds[row], cached[row], answer = first_token(llm, prompt)
        answers.append(answer)

    with (
        tempfile.TemporaryDirectory(dir=memory) as in_memory,
        tempfile.TemporaryDirectory(dir=disk) as on_disk,
    ):
        for row, store in ("cold", in_memory), ("", on_disk), ("memory", in_memory), ("disk", on_disk):
            with LLM(model, kv_store=store, **settings) as llm:
                first_token(llm, warm_up)
                num_bytes = drop_from_page_cache(on_disk)
                take(row, llm)
                if row == "memory":
                    take("prefix cache", llm)
    return {
        "seconds": {row: seconds[row] for row in ROWS},
        "num_cached_tokens": {row: cached[row] for row in ROWS},
        "store_bytes": num_bytes,
        "same_answers": all(answer == answers[0] for answer in answers),
    }


def main() -> None:
    """Measure all runs, and print a table and a JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a directory or a hub id; default: the shape with random weights")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens")
    parser.add_argument("--memory", default="/dev/shm", help="a directory in memory")
    parser.add_argument("--disk", default=".", help="a directory on a disk")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings: dict[str, Any] = {"dtype": args.dtype, "max_model_len": args.prompt + 64}
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "config.json").write_text(json.dumps(SHAPES[args.shape]))
        if args.model is None:
            settings["load_format"] = "dummy"
        runs = [
            measure(args.model or scratch, settings, args.prompt, args.memory, args.disk, run)
            for run in range(args.repeats)
        ]
    print(f"{'':12}  first token  min to max      not computed, of {args.prompt} tokens")
    for row in ROWS:
        seconds = [run["seconds"][row] for run in runs]
        print(
            f"{row:12}  {statistics.median(seconds):9.3f} s  {min(seconds):.3f} to {max(seconds):.3f}"
            f"  {runs[0]['num_cached_tokens'][row]:9}"
        )
    print(json.dumps({"model": args.model or args.shape, "prompt_tokens": args.prompt, "runs": runs}))


if __name__ == "__main__":
    main()
