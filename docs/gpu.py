"""Tools for lesson 21: they prepare nanoengine's Triton kernels for the interpreter of PTX."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from docs.ptx import Cta, GlobalMemory, Instruction
from docs.ptx_arithmetic import from_half
from nanoengine.backends import triton_attention as backend
from nanoengine.backends.kv_cache import KVCache
from nanoengine.backends.paged_attention import Settings
from tests.attention import metadata_of
from tests.launches import Emulated, Recorder

Edit = Callable[[str], str]


def write_kv_launch(k: torch.Tensor, v: torch.Tensor, slots: list[int], num_slots: int) -> Any:
    """Return the launch that writes k and v, (T, width) each, to new caches of num_slots slots."""
    k_cache, v_cache = (torch.zeros(num_slots, 1, x.shape[1], dtype=x.dtype) for x in (k, v))
    recorder = Recorder(backend._write_kv_kernel)
    with patch.object(backend, "_write_kv_kernel", recorder):
        backend.write_kv(k_cache, v_cache, k[:, None], v[:, None], torch.tensor(slots))
    return recorder.kernel, *recorder.launches[-1]


def attend_launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """Return the launch that attends to a prompt of 16 tokens. q, k and v are (16, D): one head."""
    k_cache, v_cache = (torch.stack([torch.zeros_like(x), x])[:, :, None] for x in (k, v))  # blocks 0 and 1
    metadata = metadata_of([(16, 16)], torch.tensor([[1]], dtype=torch.int32), torch.arange(16, 32))
    recorder = Recorder(backend._attend_kernel)
    with patch.object(backend, "_attend_kernel", recorder):
        attention, cache = backend.TritonAttention(metadata, 16), KVCache(k_cache, v_cache)
        attention._attend(q[:, None], k[:, None], v[:, None], cache, Settings(1.0, None, None, None))
    return recorder.kernel, *recorder.launches[-1]


def compiled(launch: Any, edit: Edit = str, generation: str = "sm80") -> tuple[list[Cta], GlobalMemory]:
    """Compile a launch for a generation of GPUs. Return its programs, not started, and the memory.

    `edit` may change the PTX.
    """
    kernel, *rest = launch
    programs, memory = Emulated(kernel, generation, lambda ptx, named: edit(ptx)).ctas(*rest)
    return list(programs), memory


def run_until(program: Cta, opcode: str) -> Instruction:
    """Execute instructions until the next opcode begins with this prefix, and return that instruction."""
    while program.next is not None:
        instruction = program.kernel.code[program.next]
        if instruction.text.split(" ")[instruction.predicate is not None].startswith(opcode):
            return instruction
        program.step()
    raise ValueError(f"the program has ended without {opcode}")


def pairs(program: Cta, register: Any) -> list[tuple[int, int]]:
    """Return the two bfloat16 numbers that each thread has in a register."""
    halves = from_half(program.get(register, "b32").view(np.uint16), "bf16").astype(int)
    return [(int(a), int(b)) for a, b in halves.reshape(-1, 2)]
