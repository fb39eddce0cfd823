"""nanoengine: a vLLM that one person can read in an evening, and run."""

from nanoengine.async_llm import AsyncLLM
from nanoengine.config import EngineConfig
from nanoengine.engine import LLMEngine
from nanoengine.llm import LLM
from nanoengine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanoengine.sampling_params import RequestOutputKind, SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "LLMEngine",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
]
__version__ = "0.1.0"
