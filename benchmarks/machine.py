"""Describes the machine of a measurement: processor, instruction set, and variables that limit it."""

import os
import platform
from pathlib import Path
from typing import Any

# Flag in /proc/cpuinfo -> instruction set that speeds up matrix products.
INSTRUCTIONS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 bfloat16"}
INSTRUCTIONS |= {"avx_vnni": "AVX VNNI", "avx512_vnni": "AVX-512 VNNI", "amx_bf16": "AMX"}
INSTRUCTIONS |= {"asimd": "NEON", "bf16": "NEON bfloat16"}
# Variables that keep a library from using newer instructions, so that a machine stands in for an older one.
LIMITS = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


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
    names = [name for flag, name in INSTRUCTIONS.items() if flag in flags] or ["unknown instructions"]
    if limits := [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]:
        names.append(f"limited by {' '.join(limits)}")
    gpu = None
    if device == "cuda":
        from torch.utils.collect_env import get_nvidia_driver_version, run

        driver = get_nvidia_driver_version(run)  # type: ignore[no-untyped-call]
        gpu = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, driver {driver}"
    return {
        "cpu": found.get("model name") or platform.processor(),
        "instructions": ", ".join(names),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": gpu,
        "system": platform.platform(),
    }
