"""What a script written for vLLM's offline interface relies on."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections import deque
from pathlib import Path

import nanoengine
from nanoengine import LLM, CompletionOutput, RequestOutput, SamplingParams
from tests.helpers import DEMO

PACKAGE = Path(nanoengine.__file__).parent


def test_the_public_names_are_exactly_these():
    assert sorted(nanoengine.__all__) == [
        "AsyncEngineArgs",
        "AsyncLLM",
        "AsyncLLMEngine",
        "ClassificationRequestOutput",
        "CompletionOutput",
        "EmbeddingRequestOutput",
        "EngineArgs",
        "EngineConfig",
        "GuidedDecodingParams",
        "LLM",
        "LLMEngine",
        "Logprob",
        "PoolingParams",
        "PoolingRequestOutput",
        "RequestMetrics",
        "RequestOutput",
        "RequestOutputKind",
        "SamplingParams",
        "ScoringRequestOutput",
        "StructuredOutputsParams",
        "TextPrompt",
        "TokensPrompt",
        "__version__",
    ]


def test_outputs_and_params_have_vllm_s_field_names():
    fields = set(RequestOutput.__dataclass_fields__)
    assert fields >= {"request_id", "prompt", "prompt_token_ids", "outputs", "finished", "num_cached_tokens"}
    assert set(CompletionOutput.__dataclass_fields__) == {
        "index",
        "text",
        "token_ids",
        "cumulative_logprob",
        "logprobs",
        "finish_reason",
        "stop_reason",
    }
    assert {"temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens"} <= set(
        SamplingParams.__dataclass_fields__
    )
    assert list(inspect.signature(LLM.generate).parameters)[1:4] == ["prompts", "sampling_params", "use_tqdm"]


def test_no_optional_file_is_imported_before_it_is_asked_for():
    code = "import sys; from nanoengine import LLM; "
    code += "print(*(name for name in sys.modules if name.startswith(('nanoengine.', 'transformers.'))))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "nanoengine.engine" in printed
    assert ".apps" not in printed
    assert ".extensions" not in printed
    assert ".contrib" not in printed
    assert "nanoengine.backends.cuda" not in printed
    assert "nanoengine.models.hf " not in printed, "transformers' own models take a second to import"
    assert "transformers.activations" not in printed, "so does what any model's own config imports"


def test_the_scheduler_is_imported_without_transformers_a_model_or_a_backend():
    code = "import sys; from nanoengine.engine import BlockManager; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    unwanted = ("transformers", "nanoengine.models", "nanoengine.llm", "nanoengine.requests")
    unwanted += tuple(f"nanoengine.backends.{name}" for name in ("cpu", "cuda", "flash", "triton"))
    assert "nanoengine.engine" in printed.split()
    assert not [name for name in printed.split() if name.startswith(unwanted)]


def test_type_checkers_see_the_public_names():
    (block,) = (
        node for node in ast.parse((PACKAGE / "__init__.py").read_text()).body if isinstance(node, ast.If)
    )
    assert {node.module for node in block.body} == {f"nanoengine.{name}" for name in nanoengine._NAMES}
    for name, module in nanoengine._MODULE_OF.items():  # defined there, and not only imported
        source = (PACKAGE / f"{module.replace('.', '/')}.py").read_text()
        assert re.search(rf"^(class {name}\b|(\w+ = )*{name} = )", source, re.MULTILINE)


def test_a_model_is_loaded_without_pytorch_s_compiler():
    code = "import sys; from nanoengine import LLM; llm = LLM('demo', max_num_seqs=1); "
    code += "assert llm.generate('Hello', use_tqdm=False); assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def shared_state() -> dict[str, str]:
    """Every mutable value that a module or a class of nanoengine holds, and how it looks now."""
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
    """Two engines never share anything: what modules and classes hold is the same after both have run."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        assert not [node for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal))]
    importlib.import_module("nanoengine.models.hf")  # which an engine imports where it needs it
    before = shared_state()
    assert "nanoengine.models.names.FUSED." in before
    for settings in ({}, {"model_impl": "transformers"}, {"async_scheduling": True, "enforce_eager": True}):
        with LLM(DEMO, num_kv_blocks=20, dtype="bfloat16", **settings) as llm:
            llm.generate(["a", "b"], SamplingParams(logprobs=1, n=2), use_tqdm=False)
            assert shared_state() == before
    assert shared_state() == before
