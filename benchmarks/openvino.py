"""OpenVINO GenAI as an engine: writes a checkpoint that it can export, exports it, and batches continuously.

nanoengine's Python writes the checkpoint. The engine's own Python exports it with optimum-intel, in a process
of its own, and runs it, so import only the standard library at the top of this file.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.runs import KV_CACHE_BYTES, LIMITS, TEMPERATURE, Run, measurements, write_weights

if TYPE_CHECKING:
    from nanoengine.checkpoints.checkpoint import Checkpoint

FORMATS = {"float32": "fp32", "float16": "fp16", "bfloat16": "fp16"}  # it has no name for bfloat16


def prepare(checkpoint: "Checkpoint", settings: dict[str, Any], directory: str) -> dict[str, Any]:
    """Return the settings for `load`. A model that is only a config gets random weights and a tokenizer."""
    kind = settings.get("weight_type")
    path = Path(directory, "openvino")
    own = settings | {"exported": f"{path}-{kind}", "weight_format": kind or FORMATS[settings["dtype"]]}
    if settings["load_format"] != "dummy":
        return own
    if not path.exists():  # the engine with another weight format has not written it
        from benchmarks.models import write_tokenizer

        write_weights(settings, path)
        write_tokenizer(checkpoint.vocab_size, path)
    return own | {"model": str(path)}


def load(settings: dict[str, Any]) -> Run:
    """Export the model with the settings from `prepare`, and load it."""
    command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino", settings["exported"]]
    command += ["--model", settings["model"], "--task", "text-generation-with-past"]
    subprocess.run([*command, "--weight-format", settings["weight_format"]], check=True)
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = KV_CACHE_BYTES >> 30
    for name, limit in LIMITS.items():
        setattr(scheduler, name, limit)
    properties = {"INFERENCE_NUM_THREADS": settings["threads"]}
    # With this limit OpenVINO still chooses by the processor, and then fails.
    if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2":
        properties |= {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    pipeline = openvino_genai.ContinuousBatchingPipeline(settings["exported"], scheduler, "CPU", properties)

    def run(prompts: list[list[int]], output_lens: list[int]) -> dict[str, Any]:
        stamps: list[list[float]] = [[] for _ in prompts]
        start = time.perf_counter()
        handles = []
        for i, (prompt, num_tokens) in enumerate(zip(prompts, output_lens, strict=True)):
            common = {"ignore_eos": True, "eos_token_id": 0, "do_sample": True, "temperature": TEMPERATURE}
            config = openvino_genai.GenerationConfig(max_new_tokens=num_tokens, **common)
            handles.append(pipeline.add_request(i, openvino.Tensor(numpy.array([prompt])), config))
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - start
            for handle, times in zip(handles, stamps, strict=True):
                while handle.can_read():
                    times += [now] * sum(len(output.generated_ids) for output in handle.read().values())
        return measurements(time.perf_counter() - start, stamps)

    return run
