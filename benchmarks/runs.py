"""Shared by all engines' runs: limits, latency figures, and the model of transformers' engines.

Import only the standard library at the top of this file: each engine has a Python of its own.
"""

import itertools
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Serves prompts with these output lengths, all at once, and returns the measurements as JSON.
Run = Callable[[list[list[int]], list[int]], dict[str, Any]]

MAX_NUM_SEQS, TEMPERATURE = 256, 0.6
LIMITS = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 8192}
KV_CACHE_BYTES = 4 << 30  # on a CPU, where it is also nanoengine's default
CORES = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))


def measurements(seconds: float, stamps: list[list[float]]) -> dict[str, Any]:
    """Return a run's seconds, tokens and latencies, from the times of each request's tokens since the start.

    ttft: time to the first token, queueing included, one per request. tpot: time per output token after the
    first, one per request. itl: time between one token and the next, one per token.
    """
    gaps = [[b - a for a, b in itertools.pairwise(times)] for times in stamps]
    return {
        "seconds": seconds,
        "output_tokens": sum(map(len, stamps)),
        "ttft": [times[0] for times in stamps],
        "tpot": [statistics.fmean(each) for each in gaps if each],
        "itl": [gap for each in gaps for gap in each],
    }


def transformers_model(settings: dict[str, Any]) -> Any:
    """Return a model on transformers' code, which samples and does not stop at a token."""
    import torch
    import transformers

    library: Any = transformers  # only partly typed
    dtype = getattr(torch, settings["dtype"])
    if settings["load_format"] == "dummy":
        config = library.AutoConfig.from_pretrained(settings["model"])
        model = library.AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = library.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
    model.generation_config = library.GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=None
    )
    return model.to(settings["device"]).eval()


def write_weights(settings: dict[str, Any], path: Path) -> None:
    """Write a checkpoint of random weights, without a tokenizer, for a model that is only a config."""
    from safetensors.torch import save_file

    path.mkdir()
    model = transformers_model(settings | {"device": "cpu"})
    weights = {name: parameter.contiguous() for name, parameter in model.named_parameters()}  # no tied copies
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    # Copied unchanged: transformers would write field names that its older versions do not know.
    (path / "config.json").write_bytes(Path(settings["model"], "config.json").read_bytes())
