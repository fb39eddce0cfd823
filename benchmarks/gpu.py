"""A profile of decode steps on a GPU, how busy it is and what takes its time; and attention of mixed batches.

python -m benchmarks.gpu
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from nanoengine import LLM, SamplingParams
from nanoengine.apps.workloads import SHAPES
from nanoengine.backends.attention import PagedAttention
from nanoengine.backends.flash import FlashAttention, VarlenAttention
from nanoengine.backends.inputs import send_inputs
from nanoengine.backends.kv_cache import KVCache, KVSpec
from nanoengine.backends.triton import TritonAttention
from nanoengine.engine import Chunk, ScheduledBatch, Sequence, build_inputs

NUM_SEQS, NUM_STEPS = 64, 50
NUM_HEADS, SPEC = 16, KVSpec(8, 128, 128, torch.bfloat16)  # Qwen3-0.6B's
BLOCK_SIZE = 256


def attention_ms(backend: type[PagedAttention], lens: list[tuple[int, int]], device: torch.device) -> float:
    """Milliseconds of a layer's attention over sequences of (new tokens, all tokens), the least of five."""
    chunks, num_blocks = [], 1
    for num_new, total in lens:
        seq = Sequence(0, [0] * total, SamplingParams())
        seq.block_table = [*range(num_blocks, num_blocks + -(-total // BLOCK_SIZE))]
        num_blocks += len(seq.block_table)
        chunks.append(Chunk(seq, total - num_new, total, False, seq.token_ids))
    num_tokens = sum(num_new for num_new, _ in lens)
    inputs = build_inputs(ScheduledBatch(chunks, [], num_tokens), BLOCK_SIZE)
    there = send_inputs(inputs, lambda arrays: [torch.tensor(array, device=device) for array in arrays])
    attention = backend(there.metadata, BLOCK_SIZE)
    cache = KVCache.zeros(SPEC, num_blocks, BLOCK_SIZE, device)
    q = torch.zeros(num_tokens, NUM_HEADS, SPEC.k_head_dim, dtype=SPEC.dtype, device=device)
    kv = q[:, : SPEC.num_kv_heads].contiguous()
    seconds = []
    for _ in range(6):  # the first sets things up
        start = time.perf_counter()
        attention(q, kv, kv, cache, scale=SPEC.k_head_dim**-0.5)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds[1:])


def mixed_batches(device: torch.device, decodes: list[tuple[int, int]], chunk: tuple[int, int]) -> None:
    """Print whether decodes are attended faster apart from the chunk of a prompt beside them."""
    for backend in (FlashAttention, VarlenAttention, TritonAttention):
        figures: dict[str, Any] = {"backend": backend.name}
        if reason := backend.obstacle([SPEC], frozenset()):
            figures["missing"] = reason
        else:
            together, *apart = (
                attention_ms(backend, lens, device) for lens in ([*decodes, chunk], decodes, [chunk])
            )
            figures |= {"together_ms": together, "apart_ms": sum(apart)}
        print(json.dumps(figures))


def main() -> None:
    """Decode, first to warm up, then under the profiler; print what takes most time, and a JSON line."""
    if not torch.cuda.is_available():
        sys.exit("this PyTorch sees no GPU")
    mixed_batches(torch.device("cuda"), [(1, 2000)] * NUM_SEQS, (1024, 3000))
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
