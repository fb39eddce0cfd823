"""nanoengine: a vLLM that one person can read in an evening, and run."""

from nanoengine.async_llm import AsyncLLM
from nanoengine.config import EngineConfig
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

# One class under each of vLLM's names.
EngineArgs = AsyncEngineArgs = EngineConfig
AsyncLLMEngine = AsyncLLM

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "EngineConfig",
    "GuidedDecodingParams",
    "LLMEngine",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]
__version__ = "0.1.0"
