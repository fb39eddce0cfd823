"""Loads and runs the engines, each in a process with a Python of its own.

`python -m benchmarks.engines NAME` reads JSON lines and answers each with one: the first line holds the
settings, each further line a run. Import only the standard library at the top of this file.
"""

import importlib.util
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks import llama_cpp, nano_vllm, openvino
from benchmarks.ablation import TRICKS, WITHOUT, settings_of
from benchmarks.runs import LIMITS, TEMPERATURE, Run, measurements, transformers_model

STATIC_BATCH = 64  # number of requests in one `generate` call
# +a8: activations are rounded to 8 bits, +a16: they are not. Without a suffix, the default of the processor.
QUANTIZED = tuple(f"{bits}{of_inputs}" for bits in ("int8", "int4") for of_inputs in ("", "+a8", "+a16"))
ATTENTION = ("flash", "varlen", "triton")  # backends on a GPU


def drive(engine: Any, prompts: list[list[int]], params: list[Any]) -> dict[str, Any]:
    """Serve requests with `add_request` and `step`, which nanoengine and vLLM both have."""
    stamps: list[list[float]] = [[] for _ in prompts]
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params[i])
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            stamps[int(output.request_id)] += [now] * len(output.outputs[0].token_ids)
    return measurements(time.perf_counter() - start, stamps)


def load_stepped(settings: dict[str, Any]) -> Run:
    """Load nanoengine, or the vLLM in its environment. The same code drives both."""
    is_vllm = settings["engine"] == "vllm"
    if is_vllm:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind
    else:
        from nanoengine import LLM, RequestOutputKind, SamplingParams

    own: dict[str, Any] = {**LIMITS, "skip_tokenizer_init": True}
    if not is_vllm:
        own = {"device": settings["device"], **settings_of(settings["engine"])}
        kind = settings["engine"].partition("-")[2]
        weights, _, activations = kind.partition("+")
        own |= {"quantization": weights} if weights in ("int8", "int4") else {}
        own |= {"activations": "int8" if activations == "a8" else "float"} if activations else {}
        own |= {"attn_backend": kind} if kind in ATTENTION else {}
    names = ("model", "dtype", "load_format", "max_model_len")
    llm = LLM(**{name: settings[name] for name in names}, **own)

    def run(prompts: list[list[int]], output_lens: list[int]) -> dict[str, Any]:
        common = {"temperature": TEMPERATURE, "ignore_eos": True, "detokenize": False}
        kind = RequestOutputKind.DELTA  # an output holds only what the step added
        params = [SamplingParams(max_tokens=n, output_kind=kind, **common) for n in output_lens]
        if is_vllm:
            return drive(llm.llm_engine, prompts, params)
        before = llm.metrics()
        result = drive(llm, prompts, params)
        spent = {name: value - before[name] for name, value in llm.metrics().items()}
        prefix = "seconds_"
        phases = {name.removeprefix(prefix): spent[name] for name in spent if name.startswith(prefix)}
        return result | {
            "steps": spent["num_steps"],
            "prefix_hit_rate": spent["prefix_cache_hits"] / spent["prefix_cache_queries"],
            "preemptions": spent["num_preemptions"],
            "phases": phases | {"rest": result["seconds"] - sum(phases.values())},
        }

    return run


def load_transformers(settings: dict[str, Any]) -> Run:
    """Load transformers' `generate`: static batches with left padding, each as long as its longest output."""
    import torch

    model = transformers_model(settings)

    def run(prompts: list[list[int]], output_lens: list[int]) -> dict[str, Any]:
        start, steps, output_tokens = time.perf_counter(), 0, 0
        # Sorted, so that the outputs of a batch have similar lengths.
        order = sorted(range(len(prompts)), key=lambda i: output_lens[i])
        for first in range(0, len(order), STATIC_BATCH):
            batch = order[first : first + STATIC_BATCH]
            width, longest = max(len(prompts[i]) for i in batch), max(output_lens[i] for i in batch)
            ids = torch.tensor([[0] * (width - len(prompts[i])) + prompts[i] for i in batch])
            mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in batch])
            ids, mask = ids.to(model.device), mask.to(model.device)
            generated = model.generate(ids, attention_mask=mask, max_new_tokens=longest).shape[1] - width
            output_tokens += sum(min(output_lens[i], generated) for i in batch)
            steps += generated
        return {"seconds": time.perf_counter() - start, "output_tokens": output_tokens, "steps": steps}

    return run


def load_limits(settings: dict[str, Any]) -> Run:
    """Return a run that measures the machine's memory bandwidth and matrix rate."""
    from nanoengine.extensions.roofline import measure_limits

    return lambda prompts, output_lens: measure_limits(settings["dtype"], settings["device"])


# name -> the package that the engine needs, and the function that loads it
LOADERS: dict[str, tuple[str, Callable[[dict[str, Any]], Run]]] = {
    "nanoengine": ("nanoengine", load_stepped),
    **{f"nanoengine-{kind}": ("nanoengine", load_stepped) for kind in (*QUANTIZED, *ATTENTION)},
    "transformers": ("transformers", load_transformers),
    "vllm": ("vllm", load_stepped),
    "nano-vllm": ("nanovllm", nano_vllm.load),
    "nano.py": ("nanoengine", nano_vllm.load),
    **{f"llama.cpp{kind}": ("llama_cpp", llama_cpp.load) for kind in ("", "-q8_0", "-q4_0")},
    **{f"openvino{kind}": ("openvino_genai", openvino.load) for kind in ("", "-int8", "-int4")},
    "limits": ("torch", load_limits),
}
ENGINES = [name for name in LOADERS if name != "limits"]
LOADERS |= {WITHOUT + trick: ("nanoengine", load_stepped) for trick in TRICKS}  # for --ablate


def worker_main(engine: str) -> None:
    """Answer each JSON line with one: load the engine with the first line's settings, then run the others."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print goes to the log
    package, load = LOADERS[engine]
    run: Run | None = None
    for line in sys.stdin:
        command, reply = json.loads(line), {}
        try:
            if run is not None:
                reply = run(*command)
            elif importlib.util.find_spec(package) is None:
                reply = {"error": "not installed"}
            else:
                run = load(command | {"engine": engine})
                names = ("torch", "triton", "flash_attn", "transformers", package)
                modules = {name: sys.modules.get(name) for name in names}
                versions = {name: getattr(m, "__version__", "unknown") for name, m in modules.items() if m}
                reply = {"versions": {"python": platform.python_version(), **versions}}
            if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
                reply["cuda_peak_bytes"] = torch.cuda.max_memory_allocated()
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    worker_main(sys.argv[1])
