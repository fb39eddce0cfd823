"""What a script written for vLLM's offline interface relies on."""

import ast
import inspect
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
        "CompletionOutput",
        "EngineArgs",
        "EngineConfig",
        "LLM",
        "LLMEngine",
        "Logprob",
        "RequestMetrics",
        "RequestOutput",
        "RequestOutputKind",
        "SamplingParams",
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


ORDER = [
    "compat",
    "sampling_params",
    "config",
    "outputs",
    "steps",
    "backends.memory",
    "backends.attention",
    "backends.device",
    "backends.cpu",
    "backends.flash",
    "backends.triton",
    "backends.cuda",
    "models.decoder",
    "models.eager",
    "models.linear",
    "models.hf",
    "models.weights",
    "sampling",
    "requests",
    "metrics",
    "engine",
    "llm",
    "async_llm",
]


ADDONS = [
    f"{room}.{path.stem}" for room in ("apps", "extensions") for path in (PACKAGE / room).glob("[!_]*.py")
]


def imported_modules(tree: ast.AST) -> set[str]:
    """What of nanoengine a file imports at once: not for type checkers, not an addon when it is asked for."""
    later: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
        if isinstance(node, ast.FunctionDef):
            later.update(ast.walk(node))
    modules = {
        str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and not (node in later and str(node.module).startswith("nanoengine.extensions."))
    }
    return {name.removeprefix("nanoengine.") for name in modules if name.startswith("nanoengine.")}


def test_imports_point_one_way():
    files = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    known = {*ORDER, *ADDONS, "demo.train"}
    assert {name for name in files if not name.endswith("__init__")} == known
    for position, name in enumerate(ORDER):
        tree = ast.parse((PACKAGE / f"{name.replace('.', '/')}.py").read_text())
        imported = imported_modules(tree)
        assert imported <= set(ORDER[:position]), f"{name}.py imports {imported}"


def test_no_addon_is_imported_before_it_is_asked_for():
    code = "import sys, nanoengine; print(*(name for name in sys.modules if name.startswith('nanoengine.')))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "nanoengine.engine" in printed
    assert ".apps" not in printed
    assert ".extensions" not in printed


def shared_state() -> dict[str, str]:
    """Every mutable value that a module or a class of nanoengine holds, and how it looks now."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("nanoengine"):
            continue
        for name, value in vars(module).items():
            owned = getattr(value, "__module__", "").startswith("nanoengine")
            members = vars(value) if isinstance(value, type) and owned else {"": value}
            for member, held in members.items():
                if isinstance(held, (list, dict, set, bytearray, deque)) and not member.startswith("__"):
                    found[f"{module_name}.{name}.{member}"] = repr(held)
                elif isinstance(value, type):
                    found[f"{module_name}.{name}.{member}"] = str(id(held))
    return {name: held for name, held in found.items() if ".__" not in name}


def test_no_state_lives_outside_objects(tmp_path_factory):
    """Two engines never share anything: what modules and classes hold is the same after both have run."""
    for name in ORDER + ADDONS:
        tree = ast.parse((PACKAGE / f"{name.replace('.', '/')}.py").read_text())
        assert not [node for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal))]
    before = shared_state()
    assert "nanoengine.models.weights.FUSED." in before
    for settings in ({}, {"model_impl": "transformers"}, {"async_scheduling": True, "enforce_eager": True}):
        with LLM(DEMO, num_kv_blocks=20, dtype="bfloat16", **settings) as llm:
            llm.generate(["a", "b"], SamplingParams(logprobs=1, n=2), use_tqdm=False)
            assert shared_state() == before
    assert shared_state() == before
