"""Measure the engine, alone or beside others. No download; the last line printed is one JSON object.

python bench.py                               # nanoengine on this machine's default workload
python bench.py --workload decode,prefix --engine nanoengine,transformers,transformers-cb
python bench.py --engine nanoengine,vllm --python vllm=/path/to/its/venv/bin/python
python bench.py --custom 64:32-256:16-64:512  # 64 requests, prompts of 32 to 256 tokens after 512 shared ones
python bench.py --rate 1,2,4                  # latency when requests come at random, so many a second
python bench.py --plot bench.png              # throughput against batch size, and where the time goes
python bench.py --what scheduler              # the host side alone: scheduler and block manager, no model

Each engine lives in a process of its own and they take turns: the first run of each, the second of
each, ... Those whose turn it is not are stopped. All get the same prompts, output lengths, dtype and
number of threads; a warm-up with other tokens goes before. The models are published shapes with random
weights, unless --model names a checkpoint. So one figure compares with another of the same run.
"""

import argparse
import ctypes.util
import importlib.util
import itertools
import json
import math
import os
import platform
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Nothing but the standard library is imported up here: each engine's own Python runs this file too.

# ---- Workloads and models ------------------------------------------------------------------------


def shape(
    family: str,
    vocab: int,
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    **more: Any,
) -> dict[str, Any]:
    """A config.json."""
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": None,
        **more,
    }


_QWEN3 = {"max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3 = {
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": _LLAMA3_ROPE,
    "rms_norm_eps": 1e-5,
}
SHAPES = {
    "qwen3-0.6b": shape("Qwen3", 151936, 1024, 3072, 28, 16, 8, 128, **_QWEN3),
    "qwen3-1.7b": shape("Qwen3", 151936, 2048, 6144, 28, 16, 8, 128, **_QWEN3),
    "llama-3.2-1b": shape("Llama", 128256, 2048, 8192, 16, 32, 8, 64, **_LLAMA3),
    "tiny": shape("Qwen3", 4096, 256, 768, 4, 8, 4, 64, **_QWEN3),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to serve: how many and how long. Lengths are drawn from closed ranges, always alike."""

    name: str
    num_requests: int
    prompt: tuple[int, int]  # tokens of its own
    output: tuple[int, int]
    shared: int = 0  # tokens that all prompts begin with
    shape: str = "qwen3-0.6b"  # the model, where --model names no other

    def lengths(self) -> tuple[list[int], list[int]]:
        """Tokens of each request's own prompt, and of each output."""
        rng = random.Random(0)
        prompt_lens = [rng.randint(*self.prompt) for _ in range(self.num_requests)]
        return prompt_lens, [rng.randint(*self.output) for _ in range(self.num_requests)]

    def prompts(self, run: str, vocab_size: int) -> list[list[int]]:
        """Random token ids; no two runs share them, so that no prefix cache carries over."""
        rng = random.Random(run)

        def draw(num_tokens: int) -> list[int]:
            return [rng.randrange(min(4000, vocab_size)) for _ in range(num_tokens)]

        prefix = draw(self.shared)
        return [prefix + draw(num_tokens) for num_tokens in self.lengths()[0]]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("nano", 256, (100, 1024), (100, 1024)),  # nano-vllm's benchmark, for a GPU
        Workload("small", 32, (32, 256), (32, 128)),
        Workload("decode", 16, (16, 32), (128, 128)),
        Workload("prefill", 16, (512, 512), (8, 8)),
        Workload("prefix", 32, (32, 32), (32, 32), shared=512),
        Workload("tiny", 128, (32, 256), (32, 256), shape="tiny"),
    )
}
SWEEP = (1, 2, 4, 8, 16, 32, 64)  # batch sizes of --plot


def parse_custom(text: str) -> Workload:
    """REQUESTS:PROMPT:OUTPUT[:SHARED], where PROMPT and OUTPUT are LENGTH or LOW-HIGH.

    >>> parse_custom("8:32-256:16").output
    (16, 16)
    """
    match = re.fullmatch(r"(\d+):(\d+)(?:-(\d+))?:(\d+)(?:-(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ValueError(text)
    requests, low, high, shortest, longest, shared = (int(part or 0) for part in match.groups())
    workload = Workload(text, requests, (low, high or low), (shortest, longest or shortest), shared)
    if requests < 1 or not all(1 <= a <= b for a, b in (workload.prompt, workload.output)):
        raise ValueError(text)
    return workload


def poisson_arrivals(rate: float, num_requests: int, seed: int = 0) -> list[float]:
    """Seconds at which requests arrive, `rate` a second on average, independent of each other."""
    rng = random.Random(seed)
    return list(itertools.accumulate(rng.expovariate(rate) for _ in range(num_requests)))


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of the values do not exceed, interpolated between neighbours.

    >>> percentile([40.0, 10.0, 30.0, 20.0], 0.5)
    25.0
    """
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def roofline_seconds(
    config: Any,
    prompt_lens: list[int],
    output_lens: list[int],
    shared: int = 0,
    *,
    bandwidth: float,
    flops: float,
    itemsize: int = 2,
) -> float:
    """Seconds that an ideal engine would take for a workload, on a machine with these two limits.

    It computes all prompts in one pass, then one token of every unfinished request a pass. A pass
    takes as long as its memory traffic or its arithmetic, whichever is longer:

        bytes   every weight once, and K and V of every token attended to, per sequence (in the first
                pass they were only just computed)
        FLOPs   2 per weight and token, the vocabulary's only for tokens that are due one; and
                4 * heads * head_dim per layer for each pair of a token and a token it attends to

    A shared prefix is computed once. Norms, activations, sampling and the host cost nothing, attention
    is full. A model that fits in the CPU's caches can be faster than memory, hence than this.

    Args:
        config: a `DecoderConfig`.
        prompt_lens: each request's tokens after the shared ones.
        output_lens: each request's tokens to generate.
        shared: tokens that all prompts begin with.
        bandwidth: bytes a second.
        flops: a second.
        itemsize: bytes of a number.
    """
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention_weights = config.hidden_size * (2 * q_size + 2 * kv_size)
    mlp_weights = 3 * config.hidden_size * config.intermediate_size
    layer_weights = config.num_layers * (attention_weights + mlp_weights)
    head_weights = config.hidden_size * config.vocab_size

    def pass_seconds(tokens: int, due: int, pairs: int, tokens_read: int) -> float:
        num_bytes = itemsize * (layer_weights + head_weights + 2 * config.num_layers * kv_size * tokens_read)
        work = 2 * (layer_weights * tokens + head_weights * due) + 4 * config.num_layers * q_size * pairs
        return float(max(num_bytes / bandwidth, work / flops))

    prefix_pairs = shared * (shared + 1) // 2
    prompt_pairs = sum(shared * n + n * (n + 1) // 2 for n in prompt_lens)
    seconds = pass_seconds(shared + sum(prompt_lens), len(prompt_lens), prefix_pairs + prompt_pairs, 0)
    for step in range(1, max(output_lens)):
        contexts = [shared + n + step for n, m in zip(prompt_lens, output_lens, strict=True) if m > step]
        seconds += pass_seconds(len(contexts), len(contexts), sum(contexts), sum(contexts))
    return seconds


# ---- Engines: what runs in a process of its own --------------------------------------------------

# Serve prompts, with these output lengths, from these arrival times on; what was measured, as JSON.
Run = Callable[[list[list[int]], list[int], list[float]], dict[str, Any]]

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, TEMPERATURE = 256, 8192, 0.6
KV_CACHE_BYTES = 4 << 30  # on a CPU; nanoengine's own choice, too
CORES = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))
STATIC_BATCH = 64  # requests of one `generate` call


def latencies(arrivals: list[float], stamps: list[list[float]]) -> dict[str, list[float]]:
    """From each request's arrival and its tokens' times, in seconds.

    ttft: time to the first token, queueing included, per request; tpot: time per output token after
    the first, per request; itl: time between one token and the next, per token.
    """
    gaps = [[b - a for a, b in itertools.pairwise(times)] for times in stamps]
    return {
        "ttft": [times[0] - arrival for arrival, times in zip(arrivals, stamps, strict=True)],
        "tpot": [statistics.fmean(each) for each in gaps if each],
        "itl": [gap for each in gaps for gap in each],
    }


def drive(
    engine: Any,
    prompts: list[list[int]],
    params: list[Any],
    arrivals: list[float],
    after_step: Callable[[list[Any]], None] = lambda outputs: None,
) -> dict[str, Any]:
    """Serve requests by `add_request` and `step`, which nanoengine and vLLM share."""
    stamps: list[list[float]] = [[] for _ in prompts]
    num_added, start = 0, time.perf_counter()
    while num_added < len(prompts) or engine.has_unfinished_requests():
        now = time.perf_counter() - start
        while num_added < len(prompts) and arrivals[num_added] <= now:
            engine.add_request(str(num_added), {"prompt_token_ids": prompts[num_added]}, params[num_added])
            num_added += 1
        if not engine.has_unfinished_requests():
            time.sleep(arrivals[num_added] - now)
            continue
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            stamps[int(output.request_id)] += [now] * len(output.outputs[0].token_ids)
        after_step(outputs)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "output_tokens": sum(map(len, stamps)), **latencies(arrivals, stamps)}


def load_stepped(settings: dict[str, Any]) -> Run:
    """nanoengine, or whatever vLLM its environment holds: where they agree, one code drives both."""
    is_vllm = settings["engine"] == "vllm"
    if is_vllm:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind
    else:
        from nanoengine import LLM, RequestOutputKind, SamplingParams

    names = ("model", "dtype", "load_format", "max_model_len")
    vllm_settings = {
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "skip_tokenizer_init": True,
    }
    own = vllm_settings if is_vllm else {"device": settings["device"]}
    llm = LLM(**{name: settings[name] for name in names}, **own)

    def run(prompts: list[list[int]], output_lens: list[int], arrivals: list[float]) -> dict[str, Any]:
        common = {"temperature": TEMPERATURE, "ignore_eos": True, "detokenize": False}
        kind = RequestOutputKind.DELTA  # an output is what the step added
        params = [SamplingParams(max_tokens=n, output_kind=kind, **common) for n in output_lens]
        if is_vllm:
            return drive(llm.llm_engine, prompts, params, arrivals)
        batch_sizes: list[int] = []
        usages: list[float] = []

        def after_step(outputs: list[Any]) -> None:
            metrics = llm.metrics()
            batch_sizes.append(metrics["num_running"] + sum(output.finished for output in outputs))
            usages.append(metrics["kv_cache_usage"])

        before = llm.metrics()
        result = drive(llm, prompts, params, arrivals, after_step)
        spent = {name: value - before[name] for name, value in llm.metrics().items()}
        phases = {
            name.removeprefix("seconds_"): value
            for name, value in spent.items()
            if name.startswith("seconds_")
        }
        return result | {
            "steps": spent["num_steps"],
            "batch_mean": statistics.fmean(batch_sizes),
            "batch_max": max(batch_sizes),
            "prefix_hit_rate": spent["prefix_cache_hits"] / spent["prefix_cache_queries"],
            "preemptions": spent["num_preemptions"],
            "peak_kv_usage": max(usages),
            "phases": phases | {"rest": result["seconds"] - sum(phases.values())},
        }

    return run


def _transformers_model(settings: dict[str, Any]) -> tuple[Any, Any]:
    """A model and the generation settings both of its engines use: sampling, and no end of sequence."""
    import torch
    import transformers

    library: Any = transformers  # partly without types

    dtype = getattr(torch, settings["dtype"])
    if settings["load_format"] == "dummy":
        config = library.AutoConfig.from_pretrained(settings["model"])
        model = library.AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = library.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
    model.generation_config = library.GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=None
    )
    return model.to(settings["device"]).eval(), model.generation_config


def load_transformers(settings: dict[str, Any]) -> Run:
    """`generate`: static batches, left padding. A batch runs as long as the longest of its outputs."""
    import torch

    model, _ = _transformers_model(settings)

    def run(prompts: list[list[int]], output_lens: list[int], arrivals: list[float]) -> dict[str, Any]:
        if any(arrivals):
            raise ValueError("static batches take no arrivals")
        start, steps, output_tokens = time.perf_counter(), 0, 0
        # Sorted, so that a batch's outputs are about as long as each other.
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
        return {
            "seconds": time.perf_counter() - start,
            "output_tokens": output_tokens,
            "steps": steps,
            "batch_mean": output_tokens / steps,
            "batch_max": min(STATIC_BATCH, len(prompts)),
        }

    return run


def load_transformers_cb(settings: dict[str, Any]) -> Run:
    """Continuous batching, as `generate_batch` does it, with an output length for each request."""
    import torch
    from transformers import ContinuousBatchingConfig

    model, generation_config = _transformers_model(settings)
    cb_config = ContinuousBatchingConfig(
        max_batch_tokens=MAX_NUM_BATCHED_TOKENS, max_requests_per_batch=MAX_NUM_SEQS
    )
    if (
        settings["device"] == "cpu"
    ):  # as much cache as the other engines take; alone, it would take all memory
        config, itemsize = model.config, getattr(torch, settings["dtype"]).itemsize
        token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize
        num_tokens = min(KV_CACHE_BYTES // token_bytes, MAX_NUM_SEQS * settings["max_model_len"])
        cb_config.num_blocks = num_tokens // cb_config.page_size

    def serve(
        manager: Any, prompts: list[list[int]], output_lens: list[int], arrivals: list[float]
    ) -> list[Any]:
        start = time.perf_counter()
        ids = []
        for prompt, num_tokens, arrival in zip(prompts, output_lens, arrivals, strict=True):
            time.sleep(max(0.0, start + arrival - time.perf_counter()))
            ids.append(manager.add_request(prompt, max_new_tokens=num_tokens, record_timestamps=True))
        finished: dict[str, Any] = {}
        while len(finished) < len(ids):
            result = manager.get_result(timeout=1)
            if result is not None and result.error is not None:
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                finished[result.request_id] = result
            elif result is None and not manager.is_running():
                raise RuntimeError("the generation thread ended")
        return [finished[request_id] for request_id in ids]

    def run(prompts: list[list[int]], output_lens: list[int], arrivals: list[float]) -> dict[str, Any]:
        manager_context = model.continuous_batching_context_manager(
            generation_config, continuous_batching_config=cb_config, warmup=settings["device"] == "cuda"
        )
        with manager_context as manager:
            serve(manager, [[0]], [1], [0.0])  # it allocates its cache when the first request comes
            start = time.perf_counter()
            outputs = serve(manager, prompts, output_lens, arrivals)
            seconds = time.perf_counter() - start
        stamps = [[stamp - start for stamp in output.timestamps] for output in outputs]
        output_tokens = sum(len(output.generated_tokens) for output in outputs)
        return {"seconds": seconds, "output_tokens": output_tokens, **latencies(arrivals, stamps)}

    return run


def load_limits(settings: dict[str, Any]) -> Run:
    """No engine: the machine's memory bandwidth and matrix rate, in what an engine's layers consist of.

    A stack of weights larger than the caches is applied to 1, 8, ... rows by the fastest way there is. One
    row reads every weight for two FLOPs each: that is bandwidth. The best rate of all is taken for the
    matrix rate.
    """
    import torch

    from nanoengine.cpu import Kernels
    from nanoengine.model import Linear

    device, dtype = torch.device(settings["device"]), getattr(torch, settings["dtype"])
    size, num_layers = 4096, 8
    row_counts = (1, 8, 16, 32, 64, 256) if device.type == "cpu" else (1, 64, 256, 1024, 4096)
    is_packed = device.type == "cpu" and dtype == torch.bfloat16

    def stack(kernels: Kernels | None = None) -> list[Linear]:
        layers = []
        for _ in range(num_layers):
            layer = Linear(size, size, bias=False, dtype=dtype, device="meta").to_empty(device=device)
            layer.requires_grad_(False).weight.fill_(0.01)
            if is_packed:
                layer.pack(kernels)
            layers.append(layer)
        return layers

    stacks = [stack()]
    if is_packed:
        with suppress(RuntimeError):  # no compiler
            stacks.append(stack(Kernels()))

    def seconds(rows: int, layers: list[Linear]) -> float:
        x = torch.full((rows, size), 0.01, dtype=dtype, device=device)
        start = time.perf_counter()
        for layer in layers:
            layer(x)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    @torch.inference_mode()
    def run(prompts: list[list[int]], output_lens: list[int], arrivals: list[float]) -> dict[str, Any]:
        best = {
            rows: min(seconds(rows, layers) for layers in stacks for _ in range(3)) for rows in row_counts
        }
        numbers = num_layers * size * size
        return {
            "bandwidth": numbers * dtype.itemsize / best[1],
            "flops": {str(rows): 2 * rows * numbers / best[rows] for rows in row_counts},
        }

    return run


# name -> the package it needs, and how it starts
LOADERS: dict[str, tuple[str, Callable[[dict[str, Any]], Run]]] = {
    "nanoengine": ("nanoengine", load_stepped),
    "transformers": ("transformers", load_transformers),
    "transformers-cb": ("transformers", load_transformers_cb),
    "vllm": ("vllm", load_stepped),
    "limits": ("torch", load_limits),
}
ENGINES = [name for name in LOADERS if name != "limits"]


def worker_main(engine: str) -> None:
    """Answer JSON lines with JSON lines: first the settings, then a run each."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print; that goes to the log
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
                modules = {name: sys.modules.get(name) for name in ("torch", "transformers", package)}
                versions = {name: module.__version__ for name, module in modules.items() if module}
                reply = {"versions": {"python": platform.python_version(), **versions}}
            if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
                reply["cuda_peak_bytes"] = torch.cuda.max_memory_allocated()
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


# ---- Workers: the other end ----------------------------------------------------------------------


@dataclass(slots=True)
class Worker:
    """An engine in its own process, stopped while others have their turn."""

    engine: str
    process: subprocess.Popen[str]
    log: Any  # what it prints
    notes: str  # settings of its environment
    versions: dict[str, str] = field(default_factory=dict)
    error: str | None = None  # why it is of no use any more

    def ask(self, command: Any) -> dict[str, Any]:
        """Its answer; an error is kept."""
        if self.error is not None:
            return {"error": self.error}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._signal(signal.SIGCONT)
        try:
            print(json.dumps(command), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        self._signal(signal.SIGSTOP)
        if not answer:
            self.log.seek(0)
            tail = " | ".join(self.log.read().strip().splitlines()[-3:])
            answer = json.dumps({"error": f"the process ended: {tail}"})
        reply: dict[str, Any] = json.loads(answer)
        return reply

    def peak_rss_bytes(self) -> int | None:
        """The most memory its processes held, each at its own peak; None where /proc does not tell."""
        import psutil

        main = psutil.Process(self.process.pid)
        total = 0
        for process in (main, *main.children(recursive=True)):
            try:
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            except OSError:
                return None
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        return total

    def close(self) -> None:
        """Let it end, or end it, and whatever it started."""
        self._signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=10)
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def start_worker(engine: str, python: str, threads: int) -> Worker:
    """Start an engine's process. Like a shell's job: a terminal that closes takes it along."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    notes = f"OMP_NUM_THREADS={threads}"
    if engine == "vllm":  # what it runs best with; it sets OMP_NUM_THREADS itself
        cores = ",".join(map(str, CORES[:threads]))
        own = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_BYTES >> 30)}
        iomp = Path(python).parent.parent / "lib" / "libiomp5.so"
        preload = [ctypes.util.find_library("tcmalloc_minimal"), str(iomp) if iomp.is_file() else None]
        own["LD_PRELOAD"] = ":".join(library for library in preload if library)
        env |= own
        notes = " ".join(f"{name}={value}" for name, value in own.items())
    else:
        env["OMP_NUM_THREADS"] = str(threads)
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (the worker closes it)
    process = subprocess.Popen(
        [python, __file__, "--worker", engine],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=env,
        process_group=0,
    )
    return Worker(engine, process, log, notes)


# ---- The benchmark of engines --------------------------------------------------------------------

LATENCIES, PERCENTILES = ("ttft", "tpot", "itl"), (0.5, 0.9, 0.99)
COUNTERS = ("steps", "batch_mean", "batch_max", "prefix_hit_rate", "preemptions", "peak_kv_usage")


def summarize(replies: list[dict[str, Any]], prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """One engine's runs of one workload as figures; what it does not report is None."""
    for reply in replies:
        if "error" not in reply and reply["output_tokens"] != output_tokens:
            reply["error"] = f"{reply['output_tokens']} output tokens of {output_tokens} asked for"
        if "error" in reply:
            return {"error": reply["error"]}

    def spread(values: list[float]) -> dict[str, float]:
        numbers = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        return {name: round(value, 2) for name, value in numbers.items()}

    row: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_s": spread([output_tokens / r["seconds"] for r in replies]),
        "total_tokens_per_s": spread([(prompt_tokens + output_tokens) / r["seconds"] for r in replies]),
    }
    for name in LATENCIES:
        values = [value for reply in replies for value in reply.get(name, [])]
        row[f"{name}_ms"] = [round(1000 * percentile(values, p), 3) for p in PERCENTILES] if values else None
    for name in COUNTERS:
        known = [reply[name] for reply in replies if name in reply]
        row[name] = round(statistics.median(known), 4) if known else None
    phases = [reply["phases"] for reply in replies if "phases" in reply]
    row["phases_s"] = (
        {p: round(statistics.median(r[p] for r in phases), 4) for p in phases[0]} if phases else None
    )
    cuda = [reply["cuda_peak_bytes"] for reply in replies if "cuda_peak_bytes" in reply]
    row["cuda_peak_bytes"] = max(cuda, default=None)
    return row


@dataclass(slots=True)
class Bench:
    """One model, served by several engines that take turns."""

    config: Any  # DecoderConfig
    itemsize: int  # bytes of a weight
    engines: list[Worker]
    limits: Worker
    bandwidth: float = 0.0  # bytes a second, the best seen so far
    flops: dict[str, float] = field(default_factory=dict)  # rows -> a second, likewise

    def warm_up(self, workload: Workload) -> None:
        """Up to 4096 prompt tokens of other prompts, 8 output tokens each."""
        prompts = workload.prompts(f"{workload.name}, warm-up", self.config.vocab_size)
        totals = itertools.accumulate(map(len, prompts))
        prompts = prompts[: max(1, sum(total <= 4096 for total in totals))]
        output_lens = [min(8, num_tokens) for num_tokens in workload.lengths()[1][: len(prompts)]]
        for worker in self.engines:
            worker.error = worker.ask([prompts, output_lens, [0.0] * len(prompts)]).get("error")

    def measure(
        self, workload: Workload, repeats: int, rate: float | None = None
    ) -> Iterator[dict[str, Any]]:
        """A row per engine: all at once, or (with a rate) as requests arrive."""
        name = workload.name if rate is None else f"{workload.name}, {rate:g} requests a second"
        prompt_lens, output_lens = workload.lengths()
        arrivals = [0.0] * len(prompt_lens) if rate is None else poisson_arrivals(rate, len(prompt_lens))
        replies: dict[str, list[dict[str, Any]]] = {worker.engine: [] for worker in self.engines}
        if rate is None:
            self.warm_up(workload)
        for run in range(repeats):
            prompts = workload.prompts(f"{name}, run {run}", self.config.vocab_size)
            for worker in self.engines:
                reply = worker.ask([prompts, output_lens, arrivals])
                replies[worker.engine].append(reply)
                done = reply.get("error") or f"{reply['output_tokens'] / reply['seconds']:.1f} tokens/s"
                print(f"{name}, run {run + 1} of {repeats}, {worker.engine}: {done}", file=sys.stderr)
            if rate is None:
                self._measure_limits()
        prompt_tokens = sum(prompt_lens) + workload.shared * len(prompt_lens)
        for worker in self.engines:
            row: dict[str, Any] = {"workload": workload.name, "engine": worker.engine, "rate": rate}
            row |= summarize(replies[worker.engine], prompt_tokens, sum(output_lens))
            if "error" not in row:
                share = row["output_tokens_per_s"]["median"] / self.roofline(workload)
                row["roofline_share"] = round(share, 4) if rate is None else None
                row["peak_rss_bytes"] = worker.peak_rss_bytes()
            yield row

    def roofline(self, workload: Workload) -> float:
        """Output tokens a second of an ideal engine on this machine."""
        prompt_lens, output_lens = workload.lengths()
        seconds = roofline_seconds(
            self.config,
            prompt_lens,
            output_lens,
            workload.shared,
            bandwidth=self.bandwidth,
            flops=max(self.flops.values()),
            itemsize=self.itemsize,
        )
        return sum(output_lens) / seconds

    def _measure_limits(self) -> None:
        """What else the machine does only ever lowers them, so the best counts."""
        reply = self.limits.ask([[], [], []])
        if "error" in reply:
            raise RuntimeError(f"the machine's limits cannot be measured: {reply['error']}")
        self.bandwidth = max(self.bandwidth, reply["bandwidth"])
        self.flops = {rows: max(rate, self.flops.get(rows, 0.0)) for rows, rate in reply["flops"].items()}


def machine(threads: int, device: str) -> dict[str, Any]:
    """Where this was measured."""
    import psutil
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "system": platform.platform(),
    }


def bench_model(model: str, workloads: list[Workload], args: argparse.Namespace) -> dict[str, Any]:
    """Start the engines on one model and let them serve the workloads, the rates and the sweep."""
    import torch

    from nanoengine.weights import open_checkpoint

    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        if model in SHAPES:
            Path(scratch, "config.json").write_text(json.dumps(SHAPES[model] | {"dtype": args.dtype}))
        checkpoint = open_checkpoint(scratch if model in SHAPES else model)
        lengths = [(n + w.shared + m) for w in workloads for n, m in zip(*w.lengths(), strict=True)]
        settings = {
            "model": str(checkpoint.path),
            "load_format": "auto" if any(checkpoint.path.glob("*.safetensors")) else "dummy",
            "dtype": args.dtype,
            "device": args.device,
            "max_model_len": max(1024, -(-max(lengths) // 256) * 256),
        }
        pythons = {"limits": sys.executable} | {e: args.pythons.get(e, sys.executable) for e in args.engine}
        workers: dict[str, Worker] = {}
        for engine, python in pythons.items():
            print(f"{model}: starting {engine}", file=sys.stderr)
            worker = workers[engine] = start_worker(engine, python, args.threads)
            stack.callback(worker.close)
            reply = worker.ask(settings)
            worker.error, worker.versions = reply.get("error"), reply.get("versions", {})
        bench = Bench(
            checkpoint.decoder_config,
            getattr(torch, args.dtype).itemsize,
            engines=[workers[engine] for engine in args.engine],
            limits=workers["limits"],
        )
        rows: list[dict[str, Any]] = []
        rooflines: dict[str, float] = {}
        sweep: dict[str, list[float | None]] = {engine: [] for engine in (*args.engine, "roofline")}
        for workload in workloads:
            rows += bench.measure(workload, args.repeats)
            rooflines[workload.name] = round(bench.roofline(workload), 1)
            for rate in args.rate:
                rows += bench.measure(workload, 1, rate)
        for size in SWEEP if args.plot else ():
            workload = Workload(f"batch {size}", size, (32, 32), (32, 32))
            for row in bench.measure(workload, 1):
                sweep[row["engine"]].append(None if "error" in row else row["output_tokens_per_s"]["median"])
            sweep["roofline"].append(round(bench.roofline(workload), 1))
        return {
            "model": model,
            "engines": {
                worker.engine: {
                    "error": worker.error,
                    "versions": worker.versions,
                    "environment": worker.notes,
                }
                for worker in bench.engines
            },
            "limits": {
                "bandwidth_gb_per_s": round(bench.bandwidth / 1e9, 1),
                "gemm_gflop_per_s": {rows: round(rate / 1e9) for rows, rate in bench.flops.items()},
                "roofline_output_tokens_per_s": rooflines,
            },
            "results": rows,
            "sweep": sweep,  # output tokens/s at each size of SWEEP
        }


def bench_engines(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print tables, draw; returns everything."""
    groups: dict[str, list[Workload]] = {}
    for workload in args.workload:
        groups.setdefault(args.model or workload.shape, []).append(workload)
    report: dict[str, Any] = {
        "machine": machine(args.threads, args.device),
        "dtype": args.dtype,
        "repeats": args.repeats,
        "workloads": [asdict(workload) for workload in args.workload],
        "models": [bench_model(model, workloads, args) for model, workloads in groups.items()],
    }
    for result in report["models"]:
        print_tables(result)
    if args.markdown:
        print_markdown(report)
    if args.plot:
        draw(report, args.plot)
    return report


# ---- Tables and plots ----------------------------------------------------------------------------


def cells(row: dict[str, Any]) -> dict[str, str]:
    """A result as text, by label; "-" is what the engine does not report."""

    def text(name: str, form: str, scale: float = 1.0) -> str:
        return "-" if row.get(name) is None else format(row[name] * scale, form)

    def spread(name: str) -> str:
        return "{median:.1f} ({min:.1f} to {max:.1f})".format(**row[name])

    labels = {
        "output tokens/s (min to max)": spread("output_tokens_per_s"),
        "total tokens/s (min to max)": spread("total_tokens_per_s"),
        "share of the roofline": text("roofline_share", ".0%"),
    }
    for name in LATENCIES:
        values = row[f"{name}_ms"]
        labels[f"{name.upper()} p50 / p90 / p99, ms"] = (
            " / ".join(f"{v:.1f}" for v in values) if values else "-"
        )
    labels |= {
        "steps": text("steps", ".0f"),
        "sequences a step, mean / most": f"{text('batch_mean', '.1f')} / {text('batch_max', '.0f')}",
        "prefix hits": text("prefix_hit_rate", ".0%"),
        "preemptions": text("preemptions", ".0f"),
        "peak KV use": text("peak_kv_usage", ".0%"),
        "peak memory, GiB": text("peak_rss_bytes", ".2f", 2**-30),
        "peak CUDA memory, GiB": text("cuda_peak_bytes", ".2f", 2**-30),
    }
    phases: dict[str, float] = row["phases_s"] or {}
    for name in ("schedule", "inputs", "forward", "sample", "update", "rest"):
        labels[f"time in {name}"] = f"{phases[name] / sum(phases.values()):.1%}" if phases else "-"
    return labels


def print_tables(result: dict[str, Any]) -> None:
    """One table per workload (and rate): a column per engine, then what they are and the limits."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    for (workload, rate), group in itertools.groupby(
        result["results"], lambda row: (row["workload"], row["rate"])
    ):
        rows = list(group)
        load = "" if rate is None else f", {rate:g} requests a second"
        table = Table("", *(row["engine"] for row in rows), title=f"{workload}{load}, {result['model']}")
        columns = [{} if "error" in row else cells(row) for row in rows]
        errors = [row.get("error", "") for row in rows]
        for label in next((column for column in columns if column), {}):
            table.add_row(label, *(column.get(label, "") for column in columns))
        if any(errors):
            table.add_row("not measured", *errors)
        console.print(table)
    for engine, about in result["engines"].items():
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        console.print(f"{engine}: {about['error'] or versions}; {about['environment']}")
    limits = result["limits"]
    rates = ", ".join(f"{rate} at {rows} rows" for rows, rate in limits["gemm_gflop_per_s"].items())
    console.print(f"memory: {limits['bandwidth_gb_per_s']} GB/s; matrix products, GFLOP/s: {rates}")
    for workload, tokens in limits["roofline_output_tokens_per_s"].items():
        console.print(f"roofline of {workload}: {tokens} output tokens/s")


def print_markdown(report: dict[str, Any]) -> None:
    """README's table: a row per workload and engine."""
    print("\n| workload | model | engine | output tokens/s (min to max) | of roofline | TTFT p50 | ITL p50 |")
    print("|---|---|---|---|---|---|---|")
    for result in report["models"]:
        for row in result["results"]:
            if row["rate"] is not None:
                continue
            start = f"| {row['workload']} | {result['model']} | {row['engine']} |"
            if "error" in row:
                print(start, f"{row['error']} | | | |")
                continue
            figures = list(cells(row).values())
            medians = [f"{row[name][0]:.0f} ms" if row[name] else "-" for name in ("ttft_ms", "itl_ms")]
            print(start, " | ".join([figures[0], figures[2], *medians]), "|")
    place = report["machine"]
    engines = {engine: about for result in report["models"] for engine, about in result["engines"].items()}
    software = [
        f"{engine} ({', '.join(f'{name} {version}' for name, version in about['versions'].items())})"
        for engine, about in engines.items()
        if about["versions"]
    ]
    hardware = f"{place['gpu'] or place['cpu']}, {place['cores']} cores, {place['memory_gib']} GiB"
    settings = f"{place['threads']} threads, {report['dtype']}, runs of each: {report['repeats']}"
    print(f"\n{hardware}; {settings}; {'; '.join(software)}. `{command_line()}`\n")


def draw(report: dict[str, Any], path: str) -> None:
    """Throughput against batch size, and where nanoengine's time went."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for result in report["models"]:
        for engine, speeds in result["sweep"].items():
            style = "k--" if engine == "roofline" else "o-"
            left.plot(
                SWEEP, [speed or math.nan for speed in speeds], style, label=f"{engine}, {result['model']}"
            )
        for row in result["results"]:
            phases: dict[str, float] = (row["rate"] is None and row.get("phases_s")) or {}
            start = 0.0
            for number, (phase, seconds) in enumerate(phases.items()):
                share = seconds / sum(phases.values())
                right.barh(row["workload"], share, left=start, color=f"C{number}", label=phase)
                start += share
    left.set(
        xlabel="sequences, 32 tokens in and 32 out", ylabel="output tokens/s", xscale="log", yscale="log"
    )
    left.set_xticks(SWEEP, [str(size) for size in SWEEP])
    left.legend()
    right.set(xlabel="share of the time", xlim=(0, 1))
    right.margins(y=0.5)  # one bar alone would fill the figure
    handles, labels = right.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    right.legend(unique.values(), unique.keys(), loc="lower center", ncols=6, bbox_to_anchor=(0.5, 1))
    figure.savefig(path, dpi=150)


# ---- The host side alone -------------------------------------------------------------------------

BLOCK_SIZE = 16


def median_us(run: Callable[[], float], repeats: int) -> tuple[float, float, float]:
    """Median, least and most of what `run` measured, in microseconds."""
    times = sorted(run() * 1e6 for _ in range(repeats))
    return statistics.median(times), times[0], times[-1]


def decode_step_us(num_seqs: int, num_blocks: int, repeats: int) -> tuple[float, float, float]:
    """Schedule and update one decode step."""
    from nanoengine.engine import BlockManager, Scheduler, Sequence
    from nanoengine.sampling import SamplingParams

    manager = BlockManager(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(manager, max_num_seqs=num_seqs, max_num_batched_tokens=16 * num_seqs)
    rng = random.Random(0)
    for seq_id in range(num_seqs):
        prompt = [rng.randrange(10**6) for _ in range(16)]
        scheduler.add(Sequence(seq_id, prompt, SamplingParams(max_tokens=None), stop_ids=frozenset({1, 2})))

    def step() -> float:
        start = time.perf_counter()
        batch = scheduler.schedule()
        scheduler.update(batch, [5] * num_seqs)
        return time.perf_counter() - start

    step()  # admits all prompts
    # Over whole blocks, so that growth, hashing and registering are in it at their true share.
    return median_us(lambda: sum(step() for _ in range(BLOCK_SIZE)) / BLOCK_SIZE, repeats)


def admission_us(num_blocks: int, repeats: int) -> tuple[float, float, float]:
    """Admit a 544-token prompt of which 512 tokens are cached: hash, look up, allocate."""
    from nanoengine.engine import BlockManager, Sequence
    from nanoengine.sampling import SamplingParams

    manager = BlockManager(num_blocks, BLOCK_SIZE)
    rng = random.Random(0)
    shared = [rng.randrange(10**6) for _ in range(512)]

    def admit(tail: list[int]) -> float:
        seq = Sequence(0, shared + tail, SamplingParams())
        start = time.perf_counter()
        hits = manager.find_prefix(seq)
        assert manager.can_allocate(seq, hits)
        manager.allocate(seq, hits)
        elapsed = time.perf_counter() - start
        manager.cache_full_blocks(seq, seq.num_tokens)
        manager.free(seq)
        return elapsed

    admit([0] * 32)
    return median_us(lambda: admit([rng.randrange(10**6) for _ in range(32)]), repeats * 20)


def bench_scheduler(repeats: int) -> dict[str, dict[str, float]]:
    """Print a table and return the medians."""
    sizes = [(1, 1_000), (16, 1_000), (64, 10_000), (256, 20_000), (256, 100_000), (1024, 100_000)]
    steps = {
        f"{seqs} running, {blocks} blocks": (seqs, decode_step_us(seqs, blocks, repeats))
        for seqs, blocks in sizes
    }
    admissions = {f"{blocks} blocks": admission_us(blocks, repeats) for blocks in (1_000, 10_000, 100_000)}
    print(f"{'µs':48}   median      min      max   per sequence")
    for key, (seqs, (median, least, most)) in steps.items():
        print(f"{'decode step, ' + key:48} {median:8.2f} {least:8.2f} {most:8.2f} {median / seqs:8.3f}")
    for key, (median, least, most) in admissions.items():
        print(f"{'admit 544 tokens, 512 cached, ' + key:48} {median:8.2f} {least:8.2f} {most:8.2f}")
    return {
        "decode_us": {key: round(figures[0], 3) for key, (_, figures) in steps.items()},
        "decode_us_per_sequence": {
            key: round(figures[0] / seqs, 3) for key, (seqs, figures) in steps.items()
        },
        "admission_us": {key: round(figures[0], 3) for key, figures in admissions.items()},
    }


# ---- Command line --------------------------------------------------------------------------------


def command_line() -> str:
    """How this was called, less the paths that are this machine's own."""
    command = shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])
    return re.sub(r"=/\S*/(?=\S+/bin/)", "=", command)


def parse_rates(text: str) -> list[float]:
    """Positive numbers, separated by commas."""
    rates = [float(rate) for rate in text.split(",")]
    if min(rates) <= 0:
        raise ValueError(text)
    return rates


def parse_arguments() -> argparse.Namespace:
    """Options, checked before anything is started."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=["engines", "scheduler"], default="engines")
    parser.add_argument(
        "--workload", help=f"one or more of {', '.join(WORKLOADS)}; default: small, on a GPU nano"
    )
    parser.add_argument("--custom", type=parse_custom, metavar="REQUESTS:PROMPT:OUTPUT[:SHARED]")
    parser.add_argument("--model", help=f"{', '.join(SHAPES)} (random weights), a directory or a hub id")
    parser.add_argument("--engine", default="nanoengine", help=f"one or more of {', '.join(ENGINES)}")
    parser.add_argument(
        "--python", action="append", default=[], metavar="ENGINE=PATH", help="its interpreter"
    )
    parser.add_argument("--repeats", type=int, help="default: 3, of the scheduler 20")
    parser.add_argument("--rate", type=parse_rates, default=[], help="requests a second: Poisson arrivals")
    parser.add_argument("--threads", type=int, default=len(CORES))
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--markdown", action="store_true", help="print README's table too")
    parser.add_argument(
        "--plot", metavar="FILE.png", help="sweep over batch sizes and draw; needs matplotlib"
    )
    parser.add_argument("--worker", choices=LOADERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.repeats is None:
        args.repeats = 3 if args.what == "engines" else 20
    if args.repeats < 1 or args.threads < 1:
        parser.error("--repeats and --threads must be at least 1")
    if args.worker or args.what == "scheduler":
        return args

    def choose(text: str, known: Iterable[str]) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        if unknown := set(names).difference(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
        return names

    args.engine = choose(args.engine, ENGINES)
    args.pythons = dict(item.partition("=")[::2] for item in args.python)
    choose(",".join(args.pythons) or ENGINES[0], ENGINES)
    if missing := [path for path in args.pythons.values() if not os.access(path, os.X_OK)]:
        parser.error(f"--python needs ENGINE=PATH of an interpreter, got {missing[0]!r}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install -e '.[bench]'")
    if args.model is None or args.model in SHAPES or Path(args.model).is_dir():
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    import torch

    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    names = choose(args.workload, WORKLOADS) if args.workload else []
    if not names and not args.custom:
        names = ["nano" if args.device == "cuda" else "small"]
    args.workload = [WORKLOADS[name] for name in names] + ([args.custom] if args.custom else [])
    return args


def main() -> None:
    args = parse_arguments()
    if args.worker:
        worker_main(args.worker)
        return
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    report = bench_scheduler(args.repeats) if args.what == "scheduler" else bench_engines(args)
    about = {"what": args.what, "command": command_line(), "started": started}
    print(json.dumps(about | {"python": platform.python_version(), "machine": platform.machine()} | report))


if __name__ == "__main__":
    main()
