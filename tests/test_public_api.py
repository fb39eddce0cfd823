"""What a script written for vLLM's offline interface relies on."""

import ast
import importlib
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


# Files from the ground up: each imports only from files before it, for type checkers too, and nowhere later.
ORDER = [
    *("compat", "flags", "sampling_params", "config", "outputs", "steps", "metrics", "detokenizer"),
    *("backends.memory", "backends.quantized", "backends.inputs", "backends.kv_cache"),
    *("backends.attention", "backends.device"),
    *("backends.cpu", "backends.flash", "backends.triton", "backends.cuda"),
    *("models.decoder", "models.eager", "models.hf_config", "models.linear"),
    *("models.states", "models.hf", "models.shard"),
    *("models.formats", "models.files", "models.gguf", "models.lora", "models.pooling"),
    *("models.weights", "logprobs", "sampling", "engine", "requests", "startup"),
    *(
        "extensions.windows",
        "extensions.states",
        "extensions.speculate",
        "extensions.reload",
        "extensions.transfer",
        "extensions.kvstore",
        "extensions.structured",
        "extensions.processors",
        "extensions.trace",
        "extensions.pooling",
    ),
    *("extensions.parallel", "llm_engine", "llm", "async_llm", "__init__"),
    *(
        "apps.viewer",
        "apps.ask",
        "apps.workloads",
        "apps.roofline",
        "apps.bench",
        "apps.lab",
        "apps.ray_data",
        "apps.tools",
        "apps.openai_api",
        "apps.responses",
        "apps.pooling_api",
        "apps.learner",
        "apps.server",
        "demo.train",
        "vllm_face",
        "__main__",
    ),
]
MODULES = {name: PACKAGE / f"{name.replace('.', '/')}.py" for name in ORDER}
# What no file below imports, even by way of others.
UNKNOWN_TO_THE_CORE = ("config", "models.", "extensions.", "apps.", "llm", "requests", "startup")


def imports_of(path: Path, package: str) -> set[str]:
    """What of a package a file imports: at once or in a function, for running or for type checkers."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if is_file(name) else str(node.module) for name in whole}
    return {name.removeprefix(f"{package}.") for name in names if name.startswith(f"{package}.")}


def is_file(module: str) -> bool:
    return (PACKAGE.parent / f"{module.replace('.', '/')}.py").is_file()


def test_imports_point_one_way():
    files = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    assert {name for name in files if not name.endswith(".__init__")} == set(ORDER)
    for position, name in enumerate(ORDER):
        imported = imports_of(MODULES[name], "nanoengine")
        assert imported <= set(ORDER[:position]), f"{name}.py imports {imported - set(ORDER[:position])}"


def test_folders_of_the_package_import_each_other_one_way_too():
    folder_of = {name: name.split(".")[0] if "." in name else name for name in ORDER}
    seen: list[str] = []
    for name in ORDER:
        if folder_of[name] not in seen[-1:]:
            assert folder_of[name] not in seen, f"{name} stands above what imports its folder"
            seen.append(folder_of[name])


def test_the_core_names_no_setting_no_model_and_no_extension():
    for name in ("engine", "sampling", "logprobs", "metrics"):
        imported = imports_of(MODULES[name], "nanoengine")
        assert not [module for module in imported if module.startswith(UNKNOWN_TO_THE_CORE)], name


def test_the_benchmarks_import_each_other_one_way():
    folder = PACKAGE.parent / "benchmarks"
    left = {path.stem: imports_of(path, "benchmarks") for path in folder.glob("*.py")}
    left["__init__"] = set()
    while left:
        free = [name for name, imported in left.items() if not imported & left.keys()]
        assert free, f"a circle of {sorted(left)}"
        for name in free:
            del left[name]


def test_no_extension_and_no_app_is_imported_before_it_is_asked_for():
    code = "import sys; from nanoengine import LLM; "
    code += "print(*(name for name in sys.modules if name.startswith(('nanoengine.', 'transformers.'))))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "nanoengine.engine" in printed
    assert ".apps" not in printed
    assert ".extensions" not in printed
    assert "nanoengine.models.hf " not in printed, "transformers' own models take a second to import"
    assert "transformers.activations" not in printed, "so does what any model's own config imports"


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
    for path in MODULES.values():
        tree = ast.parse(path.read_text())
        assert not [node for node in ast.walk(tree) if isinstance(node, (ast.Global, ast.Nonlocal))]
    importlib.import_module("nanoengine.models.hf")  # which an engine imports where it needs it
    before = shared_state()
    assert "nanoengine.models.weights.FUSED." in before
    for settings in ({}, {"model_impl": "transformers"}, {"async_scheduling": True, "enforce_eager": True}):
        with LLM(DEMO, num_kv_blocks=20, dtype="bfloat16", **settings) as llm:
            llm.generate(["a", "b"], SamplingParams(logprobs=1, n=2), use_tqdm=False)
            assert shared_state() == before
    assert shared_state() == before
