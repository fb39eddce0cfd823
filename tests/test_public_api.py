"""The public names, and what importing them loads."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest

import nanoengine
from nanoengine import LLM, CompletionOutput, RequestOutput, SamplingParams
from tests.helpers import DEMO

PACKAGE = Path(nanoengine.__file__).parent


def test_public_names_are_exactly_these():
    names = "AsyncEngineArgs AsyncLLM AsyncLLMEngine ClassificationRequestOutput CompletionOutput "
    names += "EmbeddingRequestOutput EngineArgs EngineConfig GuidedDecodingParams LLM LLMEngine Logprob "
    names += "PoolingParams PoolingRequestOutput RequestMetrics RequestOutput RequestOutputKind "
    names += "SamplingParams ScoringRequestOutput StructuredOutputsParams TextPrompt TokensPrompt __version__"
    assert sorted(nanoengine.__all__) == names.split()
    for name in nanoengine.__all__:
        assert getattr(nanoengine, name) is not None
        assert name in dir(nanoengine)
    with pytest.raises(AttributeError, match="has no attribute 'Llm'"):
        _ = nanoengine.Llm


def test_outputs_and_params_have_the_field_names_of_vllm():
    fields = set(RequestOutput.__dataclass_fields__)
    assert fields >= {"request_id", "prompt", "prompt_token_ids", "outputs", "finished", "num_cached_tokens"}
    names = "index text token_ids cumulative_logprob logprobs finish_reason stop_reason"
    assert list(CompletionOutput.__dataclass_fields__) == names.split()
    fields = set(SamplingParams.__dataclass_fields__)
    assert fields >= {"temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens"}
    assert list(inspect.signature(LLM.generate).parameters)[1:4] == ["prompts", "sampling_params", "use_tqdm"]


IMPORTS = """
import sys
from nanoengine.engine import BlockManager
print(*sys.modules)
from nanoengine import LLM
print(*sys.modules)
assert LLM("demo", max_num_seqs=1).generate("Hello", use_tqdm=False)
print(*sys.modules)
"""


def test_modules_are_imported_only_when_needed():
    run = subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True, text=True)
    scheduler, llm, answer = (line.split() for line in run.stdout.splitlines())
    unwanted = ("transformers", "nanoengine.models", "nanoengine.llm", "nanoengine.requests")
    unwanted += tuple(f"nanoengine.backends.{name}" for name in ("cpu", "cuda", "flash", "triton"))
    assert "nanoengine.engine" in scheduler
    assert not [name for name in scheduler if name.startswith(unwanted)]
    unwanted = tuple(f"nanoengine.{name}" for name in ("apps", "extensions", "contrib", "backends.cuda"))
    assert "nanoengine.llm_engine" in llm
    assert not [name for name in llm if name.startswith(unwanted)]
    # transformers' own models, and what their configs import, take a second.
    assert not {"nanoengine.models.hf", "transformers.activations"}.intersection(llm)
    assert "torch._dynamo" not in answer, "PyTorch's compiler takes seconds"


def test_type_checkers_see_the_public_names():
    (block,) = (
        node for node in ast.parse((PACKAGE / "__init__.py").read_text()).body if isinstance(node, ast.If)
    )
    modules = {name for name in nanoengine._NAMES if not name.startswith("contrib.")}
    assert {node.module for node in block.body} == {f"nanoengine.{name}" for name in modules}
    for name, module in nanoengine._MODULE_OF.items():  # defined there, and not only imported
        source = (PACKAGE / f"{module.replace('.', '/')}.py").read_text()
        assert re.search(rf"^(class {name}\b|(\w+ = )*{name} = )", source, re.MULTILINE)


def shared_state() -> dict[str, str]:
    """Return every mutable value that a module or a class of nanoengine holds."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("nanoengine"):
            continue
        for name, value in vars(module).items():
            owned = (getattr(value, "__module__", "") or "").startswith("nanoengine")
            members = vars(value) if isinstance(value, type) and owned else {"": value}
            for member, held in members.items():
                if isinstance(held, (list, dict, set, bytearray, deque)) and not member.startswith("__"):
                    found[f"{module_name}.{name}.{member}"] = repr(held)
                elif isinstance(value, type):
                    found[f"{module_name}.{name}.{member}"] = str(id(held))
    return {name: held for name, held in found.items() if ".__" not in name}


def test_no_state_lives_outside_objects(tmp_path_factory):
    """Engines share nothing: modules and classes hold the same values after several have run."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        assert not [node for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal))]
    LLM(DEMO, num_kv_blocks=20).close()  # imports the modules that every engine needs
    importlib.import_module("nanoengine.models.hf")
    before = shared_state()
    assert "nanoengine.models.names.FUSED." in before
    for settings in ({}, {"model_impl": "transformers"}, {"async_scheduling": True, "enforce_eager": True}):
        with LLM(DEMO, num_kv_blocks=20, dtype="bfloat16", **settings) as llm:
            llm.generate(["a", "b"], SamplingParams(logprobs=1, n=2), use_tqdm=False)
            assert shared_state() == before
    assert shared_state() == before
