"""What a script written for vLLM's offline interface relies on."""

import ast
import inspect
from pathlib import Path

import nanoengine
from nanoengine import LLM, CompletionOutput, RequestOutput, SamplingParams

PACKAGE = Path(nanoengine.__file__).parent


def test_the_public_names_are_exactly_these():
    assert sorted(nanoengine.__all__) == [
        "AsyncLLM",
        "CompletionOutput",
        "EngineConfig",
        "LLM",
        "Logprob",
        "RequestMetrics",
        "RequestOutput",
        "RequestOutputKind",
        "SamplingParams",
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


def test_imports_point_one_way_and_only_the_asyncio_front_imports_the_engine():
    order = [
        "sampling",
        "outputs",
        "requests",
        "cpu",
        "cuda",
        "attention",
        "model",
        "hf_model",
        "weights",
        "engine",
        "async_llm",
    ]
    for position, name in enumerate(order):
        tree = ast.parse((PACKAGE / f"{name}.py").read_text())
        imported = {
            node.module.removeprefix("nanoengine.")
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanoengine.")
        }
        assert imported <= set(order[:position]), f"{name}.py imports {imported}"


def test_no_state_lives_outside_objects():
    """No module-level mutable state, no class-level settings: two engines never share anything."""
    for name in ("engine", "attention", "cpu", "cuda", "model", "hf_model", "sampling"):
        tree = ast.parse((PACKAGE / f"{name}.py").read_text())
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
