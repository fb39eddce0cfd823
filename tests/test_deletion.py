"""Any optional file can be deleted: the rest works as before, and what needs the file names it as missing."""

import json
import multiprocessing
import re

import gguf
import numpy as np
import pytest

from tests.model_table import small_config
from tests.test_structure import FILES, PACKAGE, ring_of
from tests.without import PRELOADED, try_copy

SERVE = 'main(["serve", "demo", "--port", "0"])'
LLM_OF_STATES = 'LLM(states, load_format="dummy", **SETTINGS)'
ON_A_GPU = """
import torch
from nanoengine import EngineConfig
from nanoengine.backends.cuda import CUDA
CUDA._memory = lambda self: None
CUDA(torch.device("cuda"), EngineConfig(model="demo", enforce_eager=True)).backends
"""
QUANTIZED_ON_A_GPU = """
import torch
from nanoengine import EngineConfig
from nanoengine.backends.cuda import CUDA
from nanoengine.backends.quantized import Quantized
CUDA._memory = lambda self: None
gpu = CUDA(torch.device("cuda"), EngineConfig(model="demo", enforce_eager=True))
gpu.no_linear = None
gpu.pack(Quantized(torch.zeros(16, 16, dtype=torch.int8), torch.ones(16, 1), None, 8), None, torch.float16)
message = gpu.notes[0]
"""
INT8_ON_A_GPU = """
from nanoengine.backends.triton import TritonAttention
from nanoengine.contrib.int8_cache import of_backends
list(of_backends([TritonAttention]))
"""
ON_A_CPU = """
import logging
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("nanoengine").addHandler(handler)
LLM("demo", **SETTINGS).close()
message = lines[0]
"""
STRUCTURED = """
params = SamplingParams(structured_outputs={"regex": "a"})
LLM("demo", **SETTINGS).generate("Hello", params, use_tqdm=False)
"""
# Each optional file, or folder of one idea -> what a user does that needs it.
USES = {
    "apps.ask": 'main(["run"])',
    "apps.bench": 'main(["bench"])',
    "apps.flags": SERVE,
    "apps.gate": SERVE,
    "apps.openai_api": SERVE,
    "apps.roofline": 'main(["bench"])',
    "apps.server": SERVE,
    "apps.service": SERVE,
    "apps.tools": SERVE,
    "apps.workloads": 'main(["bench"])',
    "backends.cpu": ON_A_CPU,
    "backends.cuda": 'import torch; torch.cuda.is_available = lambda: True; LLM("demo", device="cuda:0")',
    "backends.flash": ON_A_GPU,
    "backends.triton": ON_A_GPU,
    "backends.triton_linear": QUANTIZED_ON_A_GPU,
    "contrib": 'LLM("demo", kv_store=tmp, **SETTINGS)',
    "contrib.drafts": """
LLM("demo", speculative_config={"model": "demo", "num_speculative_tokens": 2}, **SETTINGS)
""",
    "contrib.exact": """
import os
os.environ["CXX"] = "g++ -DEXACT"
LLM("demo", model_impl="transformers", **SETTINGS)
""",
    "contrib.int8_cache": 'LLM("demo", kv_cache_dtype="int8", **SETTINGS)',
    "contrib.int8_triton": INT8_ON_A_GPU,
    "contrib.kvstore": 'LLM("demo", kv_store=tmp, **SETTINGS)',
    "contrib.lab": 'main(["lab"])',
    "contrib.lab_command": 'main(["lab"])',
    "contrib.learner": 'main(["serve", "demo", "--port", "0", "--dev-mode"])',
    "contrib.lora": 'LLM("demo", lora=tmp, **SETTINGS)',
    "contrib.pace": """
LLM("demo", speculative_config={"model": "demo", "num_speculative_tokens": 2}, **SETTINGS)
""",
    "contrib.parallel": 'LLM("demo", tensor_parallel_size=2, **SETTINGS)',
    "contrib.pooling": 'LLM("demo", runner="pooling", **SETTINGS)',
    "contrib.pooling_model": 'LLM("demo", runner="pooling", **SETTINGS)',
    "contrib.processes": 'LLM("demo", tensor_parallel_size=2, **SETTINGS)',
    "contrib.shard": 'LLM("demo", tensor_parallel_size=2, **SETTINGS)',
    "contrib.processors": 'LLM("demo", logits_processors=[print], **SETTINGS)',
    "contrib.pooling_api": 'message = post("/v1/embeddings")',
    "contrib.ray_data": "from nanoengine.contrib.ray_data import Predictor",
    "contrib.reload": 'LLM("demo", **SETTINGS).sleep()',
    "contrib.responses": 'message = post("/v1/responses")',
    "contrib.stores": 'LLM("demo", kv_store=tmp, **SETTINGS)',
    "contrib.transfer": 'main(["serve", "demo", "--port", "0", "--dev-mode"])',
    "contrib.trace": 'LLM("demo", trace=print, **SETTINGS)',
    "contrib.viewer": 'main(["run", "--trace", f"{tmp}/run.html"])',
    "contrib.vllm_module": "import nanoengine.contrib.vllm_module",
    "extensions.chats": 'LLM("demo", **SETTINGS).chat([{"role": "user", "content": "Hello"}])',
    "extensions.grammars": STRUCTURED,
    "extensions.metrics": 'LLM("demo", **SETTINGS).get_metrics()',
    "extensions.speculate": """
LLM("demo", speculative_config={"method": "ngram", "num_speculative_tokens": 2}, **SETTINGS)
""",
    "extensions.states": LLM_OF_STATES,
    "extensions.schemas": STRUCTURED,
    "extensions.structured": STRUCTURED,
    "extensions.windows": """
windows = {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention"] * 4}
LLM("demo", hf_overrides=windows, **SETTINGS)
""",
    "models.eager": 'LLM("demo", model_impl="transformers", **SETTINGS)',
    "models.formats": "LLM(awq, **SETTINGS)",
    "models.gguf": "LLM(gguf, **SETTINGS)",
    "models.gguf_tokenizer": 'LLM("demo", tokenizer=gguf, **SETTINGS)',
    "models.hf": 'LLM("demo", model_impl="transformers", **SETTINGS)',
    "models.linear": 'LLM("demo", model_impl="transformers", **SETTINGS)',
    "models.states": LLM_OF_STATES,
}
BY_DEFAULT = {
    "contrib.viewer",
    "backends.cpu",
    "contrib",
    "contrib.kvstore",
    "contrib.reload",
    "extensions.speculate",
}


def test_every_optional_file_is_tried():
    files = {name for name in FILES if not name.startswith("backends.cpu.")}
    optional = {name for name in files if ring_of(name) and name not in ("apps", "extensions")}
    assert optional == USES.keys()


@pytest.fixture(scope="module")
def forks():
    """Return a context that forks processes from one that has imported PyTorch and transformers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Return what the uses refer to: a folder, two models, and a GGUF file."""
    path = tmp_path_factory.mktemp("names")
    (path / "states").mkdir()
    config = small_config("lfm2").to_dict() | {"architectures": ["Lfm2ForCausalLM"]}
    (path / "states" / "config.json").write_text(json.dumps(config))
    (path / "awq").mkdir()
    quantized = small_config("qwen3").to_dict() | {"quantization_config": {"quant_method": "awq"}}
    (path / "awq" / "config.json").write_text(json.dumps(quantized))
    writer = gguf.GGUFWriter(path / "gguf.gguf", "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a"])
    for i in range(9):  # as many as a layer has at least
        writer.add_tensor(f"blk.0.{i}", np.zeros(1, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name.partition(".")[0]: str(path / name) for name in ("tmp", "states", "awq", "gguf.gguf")}


def copy_without(missing, where):
    """Return a copy of the package in links, bytecode included, without a file or a folder."""
    (where / "nanoengine").mkdir()
    gone = PACKAGE / missing.replace(".", "/")
    for path in PACKAGE.iterdir():
        link = where / "nanoengine" / path.name
        if path == gone.parent:
            link.mkdir()
            for inner in path.iterdir():
                if inner not in (gone, gone.with_suffix(".py")):
                    (link / inner.name).symlink_to(inner)
        elif path != gone:
            link.symlink_to(path)
    return where


def in_child(forks, copy, use, names):
    ours, theirs = forks.Pipe()
    child = forks.Process(target=try_copy, args=(theirs, str(copy), use, names))
    child.start()
    theirs.close()
    try:
        assert ours.poll(120), "it neither answers nor refuses"
        return ours.recv()
    finally:
        child.kill()
        child.join()


@pytest.fixture(scope="module")
def expected(forks, names, tmp_path_factory):
    """Return the answers of the whole package, in which nothing is missing."""
    whole = copy_without("nothing", tmp_path_factory.mktemp("whole"))
    tokens, message = in_child(forks, whole, "", names)
    assert message == "nothing"
    return tokens


@pytest.mark.parametrize(
    "missing", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in USES]
)
def test_a_file_can_be_deleted(missing, forks, names, expected, tmp_path):
    tokens, message = in_child(forks, copy_without(missing, tmp_path), USES[missing], names)
    assert tokens == expected, message
    assert re.search(rf"nanoengine[./]{missing.replace('.', '[./]')}\b", message), message
    assert "\n" not in message
