"""Describes the machine of a measurement: processor, instruction set, and any older one it stands in for."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OLDER = "less than AVX2"
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
# Instruction sets for matrix products, the best last, and the flags in /proc/cpuinfo that each needs.
LEVELS = {
    OLDER: {"sse2"},
    "AVX2": {"avx2", "fma"},
    "AVX-512": _AVX512,
    "AVX-512 bfloat16": _AVX512 | {"avx512_bf16"},
    "NEON": {"asimd"},
    "NEON bfloat16": {"asimd", "bf16"},
}
# In addition: products of 8-bit integers, and of matrix tiles.
EXTRAS = {"VNNI": ({"avx512_vnni"}, {"avx_vnni"}), "AMX": ({"amx_bf16"},)}
# Variables that keep a library from using newer instructions, and the best instruction set each value allows.
STAND_INS = {
    "ATEN_CPU_CAPABILITY": {"default": OLDER, "avx2": "AVX2"},
    "MKL_ENABLE_INSTRUCTIONS": {"SSE4_2": OLDER, "AVX": OLDER, "AVX2": "AVX2", "AVX512": "AVX-512"},
    "ONEDNN_MAX_CPU_ISA": {
        "SSE41": OLDER,
        "AVX": OLDER,
        "AVX2": "AVX2",
        "AVX2_VNNI": "AVX2",
        "AVX2_VNNI_2": "AVX2",
        "AVX512_CORE": "AVX-512",
        "AVX512_CORE_VNNI": "AVX-512",
    },
}


def instruction_set(flags: set[str], environment: Mapping[str, str] = os.environ) -> str:
    """Return the instruction set that these flags allow, and the older one that it stands in for, if any.

    >>> instruction_set({"sse2", "avx2", "fma", "avx_vnni"}, {})
    'AVX2 + VNNI'
    >>> instruction_set({"asimd"}, {})
    'NEON'
    """
    levels = [name for name, needed in LEVELS.items() if needed <= flags] or ["unknown instructions"]
    extras = [name for name, ways in EXTRAS.items() if any(needed <= flags for needed in ways)]
    own = " + ".join([levels[-1], *extras])
    limits = {
        f"{name}={environment[name]}": settings[environment[name]]
        for name, settings in STAND_INS.items()
        if environment.get(name) in settings
    }
    lower = [level for level in levels[:-1] if level in limits.values()]
    return f"{own}, standing in for {lower[0]} ({' '.join(limits)})" if lower else own


def machine(threads: int, device: str) -> dict[str, Any]:
    """Describe this machine."""
    import psutil
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = set(f"{told.get('flags', '')} {told.get('Features', '')}".split())
    if platform.machine() == "arm64":  # macOS has no /proc/cpuinfo
        flags.add("asimd")
    return {
        "cpu": told.get("model name") or platform.processor(),
        "instructions": instruction_set(flags),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "system": platform.platform(),
    }
