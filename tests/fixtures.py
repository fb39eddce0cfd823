"""Fixtures and settings that all tests share."""

import gc
import inspect
import logging
import os
import signal
from functools import cache

import pytest
import torch

from nanoengine import EngineConfig
from nanoengine.extensions.structured import grammars, token_masks
from tests import doubles
from tests.helpers import byte_tokenizer, chain_checkpoint, checkpoint, table_checkpoint

# The models are tiny, and threads that share a busy core make each step wait milliseconds.
torch.set_num_threads(1)


def pytest_collection_finish():
    for logger in logging.root.manager.loggerDict.values():
        logger.propagate = True  # pytest adds its handlers to the others, 39 of PyTorch, before each test
    gc.freeze()  # no collection looks at what was imported again
    gc.enable()
    gc.set_threshold(10_000)  # not 700: tests import much more, and each collection looks at it


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    without_gpu = not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()):  # the browser alone takes seconds to start
            item.add_marker("slow")
        if without_gpu and item.get_closest_marker("gpu"):  # `keywords` also holds the names of folders
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture(scope="session")
def babbler(tmp_path_factory):
    """Return a model that samples any token, including bytes of incomplete characters."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(260, 260, generator=generator)
    return str(table_checkpoint(tmp_path_factory.mktemp("babbler"), logits, words=("é", "日本", " the")))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory):
    """Return the directory of a tiny Qwen3."""
    return checkpoint("qwen3", tmp_path_factory)[0]


# Renders strings, not lists of parts. The answer continues from the "a".
CHAT_TEMPLATE = (
    "{% if tools %}{{ tools[0]['function']['name'] }}|{% endif %}"
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture(scope="session")
def alphabet(tmp_path_factory):
    """Return a model that continues the alphabet from the last letter of the prompt."""
    path = chain_checkpoint(tmp_path_factory.mktemp("alphabet"), "abcdefghijklmnopqrstuvwxyz")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session", autouse=True)
def shared_trials():
    """Let engines of one tokenizer try grammars in one process, whose start takes 0.2 CPU seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_masks, "Trials", cache(grammars.Trials))
        yield


@pytest.fixture
def exact_kernels(monkeypatch):
    """Make batch_invariant=True the default: log-probabilities are equal to the bit under any schedule."""
    defaults = inspect.unwrap(EngineConfig.__init__).__kwdefaults__
    monkeypatch.setitem(defaults, "batch_invariant", True)


@pytest.fixture
def at_the_root(monkeypatch, pytestconfig):
    """Run a test in the root, where readers run the code."""
    monkeypatch.chdir(pytestconfig.rootpath)


@pytest.fixture
def default_sigint():
    """Handle Ctrl-C as a program does: a shell's background jobs, such as a test run, ignore it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture
def no_gc():
    """Turn the garbage collector off: no reference cycle may hold what the test expects to be freed."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def flash_doubles(monkeypatch):
    """Let the CPU act as a GPU with flash-attn, varlen_attn and graphs. Returns the calls per path."""
    return doubles.install(monkeypatch)


@pytest.fixture
def in_float32(flash_doubles, monkeypatch):
    """Let flash-attn's doubles compute in float32, for exact comparisons with transformers."""
    monkeypatch.setattr("nanoengine.backends.flash_attention.FlashKernels.dtypes", (torch.float32,))
    return flash_doubles


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """Yield a browser for all tests of this process."""
    from tests.browser import chromium

    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="session")
def serving():
    """Yield the address and the service of a server of the bundled model, in a thread of this process."""
    from nanoengine import AsyncLLM
    from tests.serving import served

    with served(AsyncLLM("demo", num_kv_blocks=200, max_num_seqs=16)) as found:
        yield found


@pytest.fixture(scope="module")
def script():
    """Return the texts that a model says in tests of a module whose `serving` is `scripted`."""
    from tests.serving import Script

    return Script()


@pytest.fixture
def url(serving):
    """Yield the address of that server. Fails if the test leaves a request unfinished."""
    from tests.serving import is_empty, wait_until

    url, service = serving
    yield url
    wait_until(lambda: service.num_samples == 0 and is_empty(service))


@pytest.fixture
def service(serving):
    return serving[1]


@pytest.fixture
def client(url):
    import openai

    http = openai.DefaultHttpxClient(verify=False)  # 65 ms less than to load certificates
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        yield client
