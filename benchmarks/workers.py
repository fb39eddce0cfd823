"""Controls the engines' processes: starts them, sends commands, stops them while others have their turn."""

import ctypes.util
import json
import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.runs import CORES, KV_CACHE_BYTES


@dataclass(slots=True)
class Worker:
    """Controls an engine in its own process, which is stopped while others have their turn."""

    engine: str
    process: subprocess.Popen[str]
    log: Any  # file with what the process prints
    notes: str  # settings in the process's environment
    versions: dict[str, str] = field(default_factory=dict)
    error: str | None = None  # why the engine can no longer be used

    def ask(self, command: Any) -> dict[str, Any]:
        """Send a command, and return the answer. Returns the stored `error` if there is one."""
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

    def close(self) -> None:
        """Let the process end, or kill it after 10 s, and kill all processes that it started."""
        self._signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=10)
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def environment(engine: str, python: str, threads: int) -> dict[str, str]:
    """Return the environment variables of an engine's process: its threads, and vLLM's best settings."""
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    if engine.startswith("llama.cpp"):  # llama.cpp does not pin its threads: two could share one core
        own["OMP_PROC_BIND"] = "true"
    if engine == "vllm":  # it sets OMP_NUM_THREADS itself
        del own["OMP_NUM_THREADS"]
        own["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, CORES[:threads]))
        own |= {"VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_BYTES >> 30), "VLLM_NO_USAGE_STATS": "1"}
        iomp = Path(python).parent.parent / "lib" / "libiomp5.so"
        preload = [ctypes.util.find_library("tcmalloc_minimal"), str(iomp) if iomp.is_file() else None]
        own["LD_PRELOAD"] = ":".join(library for library in preload if library)
    return own


def start_worker(engine: str, python: str, threads: int) -> Worker:
    """Start an engine in a process group of its own. Closing the terminal ends it, like a shell's job."""
    own = environment(engine, python, threads)
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (the worker closes it)
    process = subprocess.Popen(
        [python, "-m", "benchmarks.engines", engine],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=os.environ | own,
        cwd=Path(__file__).parent.parent,
        process_group=0,
    )
    return Worker(engine, process, log, " ".join(f"{name}={value}" for name, value in own.items()))
