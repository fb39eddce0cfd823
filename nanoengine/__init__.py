"""nanoengine: a vLLM that one person can read in an evening, and run."""

from nanoengine.engine import LLM, EngineConfig
from nanoengine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanoengine.sampling import Logprob, SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]
__version__ = "0.1.0"
