"""nanoengine: a vLLM that you can read in an evening, and run."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # tells type checkers and editors where the names of _NAMES are defined
    from nanoengine.async_llm import *
    from nanoengine.config import *
    from nanoengine.llm import *
    from nanoengine.llm_engine import *
    from nanoengine.outputs import *
    from nanoengine.requests import *
    from nanoengine.sampling_params import *

__version__ = "0.2.0"
# Log lines from level INFO up go to stderr, unless the program gives Python's root logger a handler
_log, _handler = logging.getLogger(__name__), logging.StreamHandler()
_handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
_handler.addFilter(lambda record: not logging.root.handlers)
_log.addHandler(_handler)
if _log.level == logging.NOTSET:
    _log.setLevel(logging.INFO)
_NAMES = {
    "async_llm": "AsyncLLM AsyncLLMEngine",
    "config": "AsyncEngineArgs EngineArgs EngineConfig",
    "llm": "LLM",
    "llm_engine": "LLMEngine",
    "outputs": "CompletionOutput Logprob RequestMetrics RequestOutput",
    "requests": "TextPrompt TokensPrompt",
    "sampling_params": "RequestOutputKind SamplingParams StructuredOutputsParams",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that the command's --help does not import PyTorch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"nanoengine.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
