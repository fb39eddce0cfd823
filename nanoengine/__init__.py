"""nanoengine: a vLLM that one person can read in an evening, and run."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoengine.async_llm import AsyncLLM, AsyncLLMEngine
    from nanoengine.config import AsyncEngineArgs, EngineArgs, EngineConfig
    from nanoengine.extensions.pooling import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingParams,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from nanoengine.llm import LLM
    from nanoengine.llm_engine import LLMEngine
    from nanoengine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from nanoengine.requests import TextPrompt, TokensPrompt
    from nanoengine.sampling_params import (
        GuidedDecodingParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "GuidedDecodingParams",
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
__version__ = "0.1.0"

_MODULE_OF = {
    "LLM": "llm",
    "AsyncEngineArgs": "config",
    "AsyncLLM": "async_llm",
    "AsyncLLMEngine": "async_llm",
    "ClassificationRequestOutput": "extensions.pooling",
    "CompletionOutput": "outputs",
    "EmbeddingRequestOutput": "extensions.pooling",
    "EngineArgs": "config",
    "EngineConfig": "config",
    "GuidedDecodingParams": "sampling_params",
    "LLMEngine": "llm_engine",
    "Logprob": "outputs",
    "PoolingParams": "extensions.pooling",
    "PoolingRequestOutput": "extensions.pooling",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "ScoringRequestOutput": "extensions.pooling",
    "StructuredOutputsParams": "sampling_params",
    "TextPrompt": "requests",
    "TokensPrompt": "requests",
}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is asked for: the command's --help needs no PyTorch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"nanoengine.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
