"""A server in a thread, and what tests do to it."""

import itertools
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx

from nanoengine.apps.server import Server, Service
from tests.helpers import DEMO

http = httpx.Client(timeout=60)  # patient, for machines that are busy
COMMON = ("--model", str(DEMO), "--port", "0", "--num-kv-blocks", "100")


@contextmanager
def served(engine, origins=(), **settings):
    """The server in a thread of this process; its address and its service."""
    service = Service(engine, name="demo", **settings)
    server = Server(service, 0, origins, port=0, log_level="warning")
    service.server = server  # for tests that send it a signal
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", service
    finally:
        server.should_exit = True
        thread.join()


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_empty(service) -> bool:
    metrics = service.engine.llm_engine.metrics()
    return metrics["num_free_blocks"] == metrics["num_blocks"] and not metrics["num_waiting"]


@contextmanager
def slow_steps(service, seconds=0.02):
    """Each step takes so long, and is counted."""
    runner = service.engine.llm_engine.runner
    launch, steps = runner.launch, itertools.count()

    def slowly(*args):
        time.sleep(seconds)
        next(steps)
        return launch(*args)

    runner.launch = slowly
    try:
        yield steps
    finally:
        del runner.launch


@contextmanager
def command(*flags, stdout=subprocess.PIPE, **environment):
    """The command in a process of its own; gives the process and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "nanoengine", "serve", *COMMON, *flags],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", **environment},
    )
    try:
        for line in process.stderr:
            if found := re.search(r"running on (http://127.0.0.1:\d+)", line):
                break
        yield process, found.group(1)
    finally:
        process.kill()
        process.communicate()
