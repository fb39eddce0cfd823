"""Measure where the time goes from the command to the first token: python -m benchmarks --what load."""

import json
import logging
import statistics
import subprocess
import sys
import time
from typing import Any


def load_once(model: str) -> dict[str, float]:
    """Load a model and compute one token in this process. Returns the seconds of each phase."""
    import psutil

    seconds = {"start of Python": time.time() - psutil.Process().create_time()}
    start = time.perf_counter()
    from nanoengine import LLM, SamplingParams
    from nanoengine.timing import log

    llm_class = LLM  # imports PyTorch and transformers
    seconds["import"] = time.perf_counter() - start
    handler = logging.Handler()
    handler.emit = lambda record: seconds.update([record.args] if record.levelno < logging.INFO else [])  # type: ignore
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    start, known = time.perf_counter(), sum(seconds.values())
    llm = llm_class(model)
    loaded = time.perf_counter()
    phases = sum(seconds.values()) - known - seconds.get("compiling", 0.0)
    seconds["rest of LLM()"] = loaded - start - phases
    next(llm.stream("Hello", SamplingParams(temperature=0, max_tokens=2)))
    seconds["first token"] = time.perf_counter() - loaded
    return seconds | {"all": time.time() - psutil.Process().create_time(), "CPU, all": time.process_time()}


def bench_load(model: str, repeats: int) -> dict[str, Any]:
    """Load a model in `repeats` new processes. Prints and returns the medians of the phases' seconds."""
    runs = []
    for _ in range(repeats):
        command = [sys.executable, "-m", __name__, model]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    names = dict.fromkeys(name for run in runs for name in run)
    medians = {name: statistics.median(run.get(name, 0.0) for run in runs) for name in names}
    print(*(f"{name:16} {value:7.2f} s" for name, value in medians.items()), sep="\n")
    return {"model": model, "seconds": medians, "runs": runs}


if __name__ == "__main__":
    print(json.dumps(load_once(sys.argv[1])))
