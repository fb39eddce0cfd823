"""nanoengine: a vLLM that one person can read in an evening, and run."""

from nanoengine.async_llm import AsyncLLM
from nanoengine.engine import LLM, EngineConfig
from nanoengine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanoengine.sampling import Logprob, RequestOutputKind, SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
]
__version__ = "0.1.0"
