"""A profile of decode steps on a GPU: how busy it is, and what takes its time.

python -m benchmarks.gpu
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.workloads import SHAPES
from nanoengine import LLM, SamplingParams

NUM_SEQS, NUM_STEPS = 64, 50


def main() -> None:
    """Decode, first to warm up, then under the profiler; print what takes most time, and a JSON line."""
    if not torch.cuda.is_available():
        sys.exit("this PyTorch sees no GPU")
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))
        with LLM(directory, load_format="dummy", dtype="bfloat16") as llm:
            for top_p in (1.0, 0.9):
                params = SamplingParams(top_p=top_p, max_tokens=2 * NUM_STEPS, ignore_eos=True)
                for i in range(NUM_SEQS):
                    llm.add_request(str(i), [1 + i] * 300, params)
                for _ in range(NUM_STEPS // 2):
                    llm.step()
                torch.cuda.synchronize()
                activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
                with profile(activities=activities) as profiler:
                    start = time.perf_counter()
                    for _ in range(NUM_STEPS):
                        llm.step()
                    torch.cuda.synchronize()
                    seconds = time.perf_counter() - start
                while llm.has_unfinished_requests():
                    llm.step()
                table = profiler.key_averages()
                kernels = [event for event in table if event.device_type.name == "CUDA"]
                busy = sum(event.self_device_time_total for event in kernels) / 1e6
                print(table.table(sort_by="self_cuda_time_total", row_limit=15))
                figures = {"top_p": top_p, "ms_per_step": 1e3 * seconds / NUM_STEPS, "busy": busy / seconds}
                print(json.dumps(figures | {"sequences": NUM_SEQS, "gpu": torch.cuda.get_device_name()}))


if __name__ == "__main__":
    main()
