"""Describes the machine of a measurement: processor, instruction set, and variables that limit it."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
# Instruction sets for matrix products, the best last, and the flags in /proc/cpuinfo that each needs.
LEVELS = {
    "less than AVX2": {"sse2"},
    "AVX2": {"avx2", "fma"},
    "AVX-512": _AVX512,
    "AVX-512 bfloat16": _AVX512 | {"avx512_bf16"},
    "NEON": {"asimd"},
    "NEON bfloat16": {"asimd", "bf16"},
}
# In addition: products of 8-bit integers, and of matrix tiles.
EXTRAS = {"VNNI": {"avx512_vnni", "avx_vnni"}, "AMX": {"amx_bf16"}}
# Variables that keep a library from using newer instructions, so that a machine stands in for an older one.
LIMITS = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


def instruction_set(flags: set[str], environment: Mapping[str, str] = os.environ) -> str:
    """Return the instruction set that these flags allow, and the variables that limit it.

    >>> instruction_set({"sse2", "avx2", "fma", "avx_vnni"}, {"ATEN_CPU_CAPABILITY": "default"})
    'AVX2 + VNNI, limited by ATEN_CPU_CAPABILITY=default'
    """
    levels = [name for name, needed in LEVELS.items() if needed <= flags] or ["unknown instructions"]
    own = " + ".join([levels[-1], *(name for name, any_of in EXTRAS.items() if any_of & flags)])
    limits = " ".join(f"{name}={environment[name]}" for name in LIMITS if name in environment)
    return f"{own}, limited by {limits}" if limits else own


def machine(threads: int, device: str) -> dict[str, Any]:
    """Describe this machine."""
    import psutil
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = set(f"{found.get('flags', '')} {found.get('Features', '')}".split())
    if platform.machine() == "arm64":  # macOS has no /proc/cpuinfo
        flags.add("asimd")
    return {
        "cpu": found.get("model name") or platform.processor(),
        "instructions": instruction_set(flags),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "system": platform.platform(),
    }
