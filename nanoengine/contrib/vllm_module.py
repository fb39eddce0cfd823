"""Run scripts and tools that say `import vllm` on nanoengine, unchanged.

    python -m nanoengine.contrib.vllm_module script.py its arguments
    python -m nanoengine.contrib.vllm_module -m lm_eval --model vllm ...

or, before anything imports vllm:

    from nanoengine.contrib import vllm_module
    vllm_module.install()

Modules are imported when a script asks for them. A name that is not there raises an ImportError or
AttributeError that says so. If vLLM is installed, this refuses to hide it without `--shadow` or
`install(shadow=True)`.
"""

import gc
import logging
import runpy
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from nanoengine import __all__ as PUBLIC
from nanoengine import __version__
from nanoengine.apps.flags import FlexibleArgumentParser

__all__ = [
    "FlexibleArgumentParser",
    "LoRARequest",
    "cleanup_dist_env_and_memory",
    "get_tokenizer",
    "init_logger",
    "install",
    "print_embeddings",
    "random_uuid",
    "resolve_chat_template",
    "resolve_hf_chat_template",
]
VERSION = f"0.33.0+nanoengine.{__version__}"  # the vLLM version that these names are from
HERE = "nanoengine.contrib.vllm_module"
PROCESSORS = "nanoengine.contrib.processors"
# vLLM's module -> nanoengine's module with the names that scripts import from it
MODULES = {
    "vllm": "nanoengine",
    "vllm.config": "nanoengine.config",
    "vllm.distributed": HERE,
    "vllm.distributed.parallel_state": HERE,
    "vllm.distributed.weight_transfer.nccl_common": "nanoengine.contrib.transfer",
    "vllm.distributed.weight_transfer.packed_tensor": "nanoengine.contrib.transfer",
    "vllm.engine.arg_utils": "nanoengine.config",
    "vllm.engine.async_llm_engine": "nanoengine.async_llm",
    "vllm.engine.llm_engine": "nanoengine.llm_engine",
    "vllm.entrypoints.chat_utils": HERE,
    "vllm.entrypoints.llm": "nanoengine.llm",
    "vllm.inputs": "nanoengine.requests",
    "vllm.logger": HERE,
    "vllm.logprobs": "nanoengine.outputs",
    "vllm.lora.request": HERE,
    "vllm.outputs": "nanoengine.outputs",
    "vllm.pooling_params": "nanoengine.contrib.pooling",
    "vllm.renderers.hf": HERE,
    "vllm.sampling_params": "nanoengine.sampling_params",
    "vllm.sequence": "nanoengine.outputs",
    "vllm.tokenizers": HERE,
    "vllm.transformers_utils.tokenizer": HERE,
    "vllm.utils": HERE,
    "vllm.utils.argparse_utils": HERE,
    "vllm.utils.network_utils": "nanoengine.contrib.transfer",
    "vllm.utils.print_utils": HERE,
    "vllm.v1.engine.async_llm": "nanoengine.async_llm",
    "vllm.v1.engine.llm_engine": "nanoengine.llm_engine",
    "vllm.v1.metrics.reader": "nanoengine.extensions.metrics",
    "vllm.v1.sample.logits_processor": PROCESSORS,
    "vllm.v1.sample.logits_processor.builtin": PROCESSORS,
    "vllm.v1.sample.logits_processor.interface": PROCESSORS,
}
PACKAGES = {".".join(name.split(".")[:depth]) for name in MODULES for depth in range(1, name.count(".") + 1)}

# ---- Names that only scripts for vLLM need -------------------------------------------------------


@dataclass(frozen=True)
class LoRARequest:
    """Names an adapter for one request. nanoengine refuses such a request, and says what to do instead."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect garbage, which frees an engine that was deleted."""
    gc.collect()


def get_tokenizer(tokenizer_name: str | Path, *, tokenizer_mode: str = "auto", **settings: Any) -> Any:
    """Load a tokenizer from a directory or a hub id. `settings` are passed to `from_pretrained`."""
    from transformers import AutoTokenizer

    if tokenizer_mode not in ("auto", "hf"):
        raise ValueError(f"tokenizer_mode must be auto or hf, got {tokenizer_mode!r}")
    settings = {name: value for name, value in settings.items() if value is not None}
    return AutoTokenizer.from_pretrained(tokenizer_name, **settings)


def init_logger(name: str) -> logging.Logger:
    """Return the logger with this name."""
    return logging.getLogger(name)


def print_embeddings(embeds: Sequence[float], max_elements: int = 16) -> None:
    """Print the first numbers of an embedding, and its size."""
    print(f"Embedding: {list(embeds[:max_elements])} ... (size={len(embeds)})")


def random_uuid() -> str:
    """Return 32 random hexadecimal digits."""
    return uuid.uuid4().hex


def resolve_chat_template(
    tokenizer: Any, chat_template: str | None = None, tools: Any = None, **unused: Any
) -> str | None:
    """Return the given template, else the tokenizer's own, or None if it has none."""
    if chat_template is not None or not tokenizer.chat_template:
        return chat_template
    template: str = tokenizer.get_chat_template(tools=tools)
    return template


resolve_hf_chat_template = resolve_chat_template  # vLLM's older name

# ---- The modules ------------------------------------------------------------------------------------


class VllmModule(ModuleType):
    """Stands for a module of vLLM. Its attributes are looked up in nanoengine's modules."""

    def __getattr__(self, name: str) -> Any:
        if f"{self.__name__}.{name}" in MODULES.keys() | PACKAGES:
            return import_module(f"{self.__name__}.{name}")
        ours = MODULES.get(self.__name__)
        if ours is not None and not name.startswith("_") and (ours != "nanoengine" or name in PUBLIC):
            value = getattr(import_module(ours), name, None)
            if value is not None and not isinstance(value, ModuleType):
                return value
        raise AttributeError(f"{self.__name__} is nanoengine here, which has no {self.__name__}.{name}")


class Finder(DistributionFinder, Loader):
    """Finds vLLM's modules, and vLLM among the installed distributions."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module under vLLM's name, or None for any other name."""
        if name not in MODULES and name not in PACKAGES:
            return None
        return spec_from_loader(name, self, origin=__file__, is_package=name in PACKAGES)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create the module."""
        return VllmModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Set the module's file, and the version of `vllm`."""
        module.__file__ = __file__
        if module.__name__ == "vllm":
            module.__version__ = VERSION  # type: ignore[attr-defined]

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        """Yield vLLM's metadata, if the search is for all distributions or for vllm."""
        if getattr(context, "name", None) in (None, "vllm"):
            yield Installed()


class Installed(Distribution):
    """Makes `importlib.metadata` report vLLM as installed."""

    def read_text(self, filename: str) -> str | None:
        """Return the METADATA file, with a name and a version."""
        return f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        """Return a path next to this file."""
        return Path(__file__).parent / path


def install(shadow: bool = False) -> None:
    """Make `import vllm` import nanoengine. ImportError: vLLM is imported, or installed without `shadow`."""
    found = find_spec("vllm")
    if found is not None and found.origin == __file__:
        return
    if "vllm" in sys.modules or (found is not None and not shadow):
        found_as = "imported already" if "vllm" in sys.modules else "installed: pass shadow=True to hide it"
        raise ImportError(f"nanoengine cannot stand in for vllm, which is {found_as}", name="vllm")
    sys.meta_path.insert(0, Finder())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a script, or with -m a module, with nanoengine in vLLM's place."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    shadow = given[:1] == ["--shadow"]
    given = given[shadow:]
    is_module = given[:1] == ["-m"]
    given = given[is_module:]
    if not given or given[0].startswith("-"):
        sys.exit(f"{__doc__}")
    install(shadow)
    sys.argv = given
    if is_module:
        runpy.run_module(given[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(given[0]).resolve().parent)  # a script can import the files next to it
        runpy.run_path(given[0], run_name="__main__")


if __name__ == "__main__":
    main()
