"""Measure how many events a second `nanoengine serve` streams.

python -m examples.streams [STREAMS ...]    # the last line printed is one JSON object

The forward pass is a sleep of 4 ms, so that only the host's work remains: the server's and the engine's. An
event should hold one token. It holds more when the server lags. The client reads plain sockets, because an
HTTP library takes longer to read an event than the server to write it. It shares the last core with it.
The host's time per step is printed beside that of the same step without a server.
"""

import json
import os
import selectors
import socket
import sys
import time
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.host import spread, start_decodes, stub_sampling
from benchmarks.machine import machine
from benchmarks.runs import CORES
from benchmarks.served import serving
from nanoengine.async_llm import AsyncLLM
from nanoengine.backends.device import Forward
from nanoengine.config import EngineConfig
from nanoengine.llm_engine import LLMEngine
from nanoengine.sampling_params import RequestOutputKind
from nanoengine.server import process as server

STEP_SECONDS, NUM_TOKENS, REPEATS = 0.004, 300, 5


class Sleep(Forward):
    """Replaces the forward pass: takes STEP_SECONDS, and computes nothing."""

    def __call__(self, compute: Any, inputs: Any) -> Tensor:
        """Return meaningless hidden states, (T, 1)."""
        time.sleep(STEP_SECONDS)
        return torch.empty(len(inputs.input_ids), 1)


def stubbed(**settings: Any) -> AsyncLLM:
    """Return an engine that computes nothing, and whose tokens are those of a text."""
    engine = AsyncLLM(**settings)
    engine.llm_engine.runner.forward = Sleep()
    stub_sampling(engine.llm_engine, settings["max_num_seqs"])
    return engine


def stream(port: int, num_streams: int, num_tokens: int) -> tuple[float, float]:
    """Stream answers at once. Returns the events per second and per token.

    The rate is measured between a fifth and four fifths of all events.
    """
    body = {"prompt": "Hello", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    content = json.dumps(body | {"model": "demo", "temperature": 0})
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode()
    selector, times = selectors.DefaultSelector(), [(time.perf_counter(), 0)]
    for _ in range(num_streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request)
        selector.register(connection, selectors.EVENT_READ, connection)
    while selector.get_map():
        num_events = times[-1][1]
        for key, _ in selector.select():
            data = key.data.recv(1 << 16)
            num_events += data.count(b"data: {")
            if not data or b"data: [DONE]" in data:
                selector.unregister(key.data)
                key.data.close()
        times.append((time.perf_counter(), num_events))
    middle = [point for point in times if 0.2 <= point[1] / num_events <= 0.8]
    (start, first), (end, last) = middle[0], middle[-1]
    return (last - first) / (end - start), num_events / (num_streams * num_tokens)


def alone(num_seqs: int) -> float:
    """Return the host's milliseconds per step of this many decodes without a server."""
    settings: dict[str, Any] = {"max_num_seqs": num_seqs, "num_kv_blocks": 32 * num_seqs}
    engine = LLMEngine(EngineConfig(model="demo", max_model_len=1024, **settings))
    engine.runner.forward = Sleep()
    stub_sampling(engine, num_seqs)
    start_decodes(engine, num_seqs, 2, output_kind=RequestOutputKind.DELTA, ignore_eos=True)
    start = time.perf_counter()
    for _ in range(NUM_TOKENS):
        engine.step()
    seconds = (time.perf_counter() - start) / NUM_TOKENS
    engine.close()
    return 1e3 * (seconds - STEP_SECONDS)


def main(numbers: list[int], num_tokens: int = NUM_TOKENS, repeats: int = REPEATS) -> None:
    """Measure each number of streams, and print a table and a JSON line."""
    most, rows = max(numbers), []
    command = [sys.executable, "-m", "examples.streams", "serve", "demo", "--max-num-seqs", str(most)]
    with serving([*command, "--max-model-len", "1024", "--num-kv-blocks", str(32 * most)]) as port:
        os.sched_setaffinity(0, CORES[-1:])
        for number in numbers:
            stream(port, number, num_tokens)  # a warm-up
            rates, shares = zip(*(stream(port, number, num_tokens) for _ in range(repeats)), strict=True)
            row = {
                "streams": number,
                **spread(rates),
                "events per token": min(shares),
                "alone": alone(number),
            }
            row["host"] = 1e3 * (number / row["median"] - STEP_SECONDS)
            rows.append(row)
            figures = "{streams} streams: {median:.0f} events/s ({min:.0f} to {max:.0f})".format(**row)
            host = "{host:.1f} ms of the host per step, {alone:.1f} ms without a server".format(**row)
            print(f"{figures}, at least {min(shares):.3f} events per token; {host}", flush=True)
    os.sched_setaffinity(0, CORES)
    print(json.dumps({"machine": machine(len(CORES), "cpu"), "results": rows}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        with patch.object(server, "AsyncLLM", stubbed):
            server.main(sys.argv[2:])
    else:
        main([*map(int, sys.argv[1:])] or [64, 128, 256])
