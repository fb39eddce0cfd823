"""A server in a thread, and what tests do to it."""

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from functools import cache

import httpx
import pytest
from transformers import AutoTokenizer

from nanoengine import AsyncLLM, requests
from nanoengine.server.lifecycle import Server
from nanoengine.server.service import Service
from tests.helpers import DEMO, change_tensors, edit_config

TIMEOUT = 300.0  # seconds until a test gives up; a busy machine may need many
# Each request opens a connection, since the server may close an idle one just as it is used again.
http = httpx.Client(timeout=TIMEOUT, limits=httpx.Limits(max_keepalive_connections=0))
COMMON = ("--model", str(DEMO), "--port", "0", "--num-kv-blocks", "100")

TEMPLATE = """
{%- if tools %}<|system|># Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>
{% endif %}{% endif %}"""


class Script:
    """Makes the bundled model generate the test's text, chosen by the end of the conversation."""

    def __init__(self):
        self.says = {}
        self.tokenizer = tokenizer = AutoTokenizer.from_pretrained(DEMO)
        self.encode = cache(lambda text: tokenizer(text, add_special_tokens=False).input_ids)
        self.decode = cache(tokenizer.decode)  # each is called at every token

    def __call__(self, prompt_ids, output_ids, logits):
        asked = self.decode(tuple(prompt_ids)).rpartition("<|user|>")[2]
        text = next((text for words, text in self.says.items() if words in asked), None)
        if text is not None:
            wanted = self.encode(text)
            logits[[*wanted, self.tokenizer.eos_token_id][min(len(output_ids), len(wanted))]] += 1000.0
        return logits


@contextmanager
def scripted(script, path, template=TEMPLATE, layers=1, **settings):
    """Yield address and service of a server of the bundled model's first layers that generates a script."""
    shutil.copytree(DEMO, path)
    (path / "chat_template.jinja").write_text(template)
    edit_config(path, num_hidden_layers=layers, layer_types=["full_attention"] * layers)
    others = re.compile(rf"layers\.[{layers}-9]\.")
    change_tensors(path, lambda x: x.update(dict.fromkeys(filter(others.search, x))))
    engine = AsyncLLM(str(path), num_kv_blocks=300, logits_processors=[script])
    with closing(engine), served(engine, **settings) as found:
        yield found


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(engine, origins=(), **settings):
    """Yield the address and the service of a server in a thread of this process."""
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


def post(url, path="completions", **asked):
    """Return the answer to a POST as JSON."""
    return http.post(f"{url}/v1/{path}", json=asked).json()


def threads_of_checks(monkeypatch, checker):
    """Return lists that grow by the threads which tokenize and check prompts."""
    threads: dict = {"tokenized": [], "checked": []}

    def note(what, owner, name):
        function = getattr(owner, name)

        def noted(*arguments, **settings):
            threads[what].append(threading.current_thread())
            return function(*arguments, **settings)

        monkeypatch.setattr(owner, name, noted)

    note("tokenized", checker, "encode")
    note("checked", requests, "read_prompt")
    return threads


def connected(url):
    """Return a socket that is connected to the server."""
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=TIMEOUT)


def post_in_bytes(path, body):
    """Return a POST as bytes, for clients that misbehave."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


async def until(condition):
    """Wait like `wait_until`, in a coroutine."""
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.001)


def is_empty(service) -> bool:
    metrics = service.engine.llm_engine.metrics()
    return metrics["num_free_blocks"] == metrics["num_blocks"] and not metrics["num_waiting"]


def num_running(service):
    return service.engine.llm_engine.metrics()["num_running"]


class Steps:
    """Makes each step of an engine wait for a permit."""

    def __init__(self):
        self.num_begun = self.num_permitted = 0
        self._permits = threading.Semaphore(0)

    def begin(self, batch):
        """Wait for a permit, in the engine's thread."""
        self.num_begun += 1
        assert self._permits.acquire(timeout=TIMEOUT)

    def permit(self, number=10**4):  # the release of each takes a microsecond
        self.num_permitted += number
        self._permits.release(number)

    def permit_until(self, condition):
        """Permit steps one by one until the condition holds while a step waits."""
        wait_until(lambda: self.is_held)
        while not condition():
            self.permit(1)
            wait_until(lambda: self.is_held)

    @property
    def is_held(self):
        """Whether a step waits."""
        return self.num_begun > self.num_permitted


@contextmanager
def before_each_step(engine, function):
    """Call a function with each step's batch before its forward pass. The last step's outputs are sent."""
    runner = engine.llm_engine.runner
    launch, deliver = runner.launch, runner.before_forward

    def launch_noted(batch, *args):
        runner.before_forward = lambda: (deliver(), function(batch))
        return launch(batch, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "launch", launch_noted)
        patch.setattr(runner, "before_forward", deliver)  # the former one is back at the end
        yield


@contextmanager
def held_steps(engine):
    """Let steps begin only with a permit, until the end of the block."""
    steps = Steps()
    with before_each_step(engine, steps.begin):
        try:
            yield steps
        finally:
            steps.permit()


@contextmanager
def paced_steps(engine):
    """Begin each step when the previous one's outputs are taken, so that each token's text is one piece."""

    def wait_for_consumers(batch):
        for mailbox in [request.inbox for request in [*engine.llm_engine.requests.values()]]:
            is_delivered = threading.Event()
            mailbox.loop.call_soon_threadsafe(is_delivered.set)
            assert is_delivered.wait(TIMEOUT)
            wait_until(lambda mailbox=mailbox: mailbox.output is None)

    with before_each_step(engine, wait_for_consumers):
        yield


@contextmanager
def command(*flags, stdout=subprocess.PIPE, **environment):
    """Run the command in a process of its own. Yields the process and its address."""
    arguments = [sys.executable, "-m", "nanoengine", "serve", *COMMON, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    pipes = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(arguments, env=environment, **pipes)
    try:
        for line in process.stderr:
            if found := re.search(r"running on (http://127.0.0.1:\d+)", line):
                break
        yield process, found.group(1)
    finally:
        process.kill()
        process.communicate()


def hold(token_ids, logits):
    """Stop requests at token 100 while a file exists. A logits processor for `command`."""
    while len(token_ids) == 99 and os.path.exists(os.environ["HELD"]):
        time.sleep(0.005)
    return logits
