"""Defines `EngineConfig`, all settings of an engine, validated once."""

from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

import torch

from nanoengine.sampling_params import accepts, check_bool, check_integer, check_number, choices

if TYPE_CHECKING:  # at run time it is imported for an engine with drafts
    from nanoengine.speculative_config import SpeculativeConfig

P = TypeVar("P")


Online = Literal["int8", "int4"]  # for weights that are quantized while they are loaded
Integers = Literal["gptq", "gptq_marlin", "auto-round", "awq", "compressed-tensors", "bitsandbytes", "gguf"]
InFiles = Literal[Integers, "fp8", "modelopt", "mxfp4"]
ONLINE_FORMATS, FILE_FORMATS = get_args(Online), get_args(InFiles)

SIZES = "max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks", "kv_cache_bytes"
LOWEST = dict.fromkeys((*SIZES, "num_state_slots", "tensor_parallel_size", "max_concurrent_requests"), 1)
LOWEST |= {"max_model_len": 2, "max_logprobs": -1, "long_prefill_token_threshold": 0}
# Settings for which None, the default in vLLM, stands for the default here
NULLABLE = "enable_prefix_caching", "enforce_eager", "generation_config", "max_num_seqs", "seed"


@accepts("engine", NULLABLE)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Holds all settings of an engine, like vLLM's EngineArgs. It is immutable.

    Raises:
        ValueError, TypeError: a setting is out of range or not supported. The message names it.
    """

    # The comments are the help of `nanoengine serve`, and the table in docs/guide/settings.md

    model: str | Path = field(kw_only=False)  # hub id, directory or GGUF file; "demo": the bundled model
    tokenizer: str | Path | None = None  # hub id or directory of the tokenizer; by default the model's own
    revision: str | None = None  # branch, tag or commit of a hub model; by default the main branch
    gguf_file: str | None = None  # name of the GGUF file to load, if the directory or hub model has several
    dtype: str | torch.dtype = "auto"  # of the weights, such as "bfloat16"; "auto": the checkpoint's own
    device: str = "auto"  # "cpu", "cuda" or "cuda:1"; "auto": CUDA if it is available, else the CPU
    seed: int = 0  # seed of requests without one of their own
    max_model_len: int | None = None  # limit on prompt plus output, in tokens; by default the model's maximum
    # tokens per block of the KV cache; by default 32, but 256 on a GPU with flash-attn or without Triton
    block_size: int | None = None
    num_kv_blocks: int | None = None  # blocks of the KV cache; by default as many as the memory holds
    kv_cache_dtype: Literal["auto", "int8"] = "auto"  # "int8": round K and V to 8 bits
    kv_cache_bytes: int | None = None  # size of the KV cache in bytes, in place of num_kv_blocks
    # recurrent states to hold, of running and cached sequences; by default twice max_num_seqs, if they fit
    num_state_slots: int | None = None
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory for weights, activations and KV cache
    max_num_seqs: int = 256  # limit on sequences that run at the same time
    max_num_batched_tokens: int | None = None  # token budget of a step; by default 1024 on a CPU, else 8192
    max_logprobs: int = 20  # limit on the log-probabilities a request may ask for per token; -1: no limit
    # log-probabilities of the model's logits, or of the logits that tokens are sampled from
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    long_prefill_token_threshold: int = 0  # limit on the tokens of one sequence per step; 0: no limit
    enable_prefix_caching: bool = True  # reuse the KV blocks of prompts that begin with the same tokens
    # order of waiting requests: as they arrive, or by priority, where a lower number runs first
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    # subclass of `Scheduler` to run requests with, or "module:Class": see docs/guide/scheduling.md
    scheduler_cls: type[Any] | str | None = None
    pin_threads: bool = True  # on a CPU: pin each PyTorch thread to a core while a step runs
    # code that computes attention; "auto": the fastest that supports the model
    attn_backend: Literal["auto", "flash", "varlen", "triton", "compiled", "torch"] = "auto"
    enforce_eager: bool = False  # plain PyTorch: no compiled kernels, no CUDA graphs
    # on a CPU with compiled kernels: log-probabilities depend on no schedule, to the last bit
    batch_invariant: bool = False
    async_scheduling: bool | None = None  # schedule a step while another runs; by default on a GPU only
    # speculative decoding: "method", "num_speculative_tokens" and the other fields of `SpeculativeConfig`
    speculative_config: dict[str, Any] | None = None
    # int8, int4: quantize the weights of linear layers; others assert the checkpoint's own format
    quantization: Online | InFiles | None = None
    # inputs of quantized layers, on a CPU: rounded to 8 bits by groups ("int8"), or as they are ("float");
    # "auto": int8 in 16-bit dtypes, if the processor is faster with integers; int8 gives int4 a 6-bit head
    activations: Literal["auto", "int8", "float"] = "auto"
    lora: str | Path | None = None  # directory with a PEFT adapter, merged into the weights at load time
    tensor_parallel_size: int = 1  # number of processes that split the weights of every layer
    # "dummy": random weights, from config.json alone; "auto" and "safetensors": the checkpoint's
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    # the model code to run; "auto" and "vllm": nanoengine's if it supports the model, else transformers'
    model_impl: Literal["auto", "vllm", "nanoengine", "transformers"] = "auto"
    trust_remote_code: bool = False  # run Python code from the checkpoint
    hf_overrides: dict[str, Any] | None = None  # fields that override the checkpoint's config.json
    # default sampling parameters: "auto": the checkpoint's; "vllm": vLLM's
    generation_config: Literal["auto", "vllm"] = "auto"
    # for every request: functions as in SamplingParams, or "module:function"
    logits_processors: list[Any] | None = None
    # record what each step did: a file for JSON lines, or a function to call with each event
    trace: str | Path | Callable[[Any], Any] | None = None
    # keep K and V beyond the life of the process: a directory, "redis://host:port/db", or an object with the
    # methods of `Store` in extensions/kvstore/stores.py
    kv_store: Any = None

    def __post_init__(self) -> None:
        """Check types and ranges."""
        for item in fields(self):
            name, value = item.name, getattr(self, item.name)
            if value is None and item.default is None:
                continue
            if isinstance(item.default, bool) or name == "async_scheduling":
                check_bool(name, value)
            elif name in LOWEST:
                check_integer(name, value, LOWEST[name], 2**62 if item.default is None else 2**31 - 1)
            elif (allowed := choices(item.type)) and value not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
        check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, open_low=True)
        if self.speculation is not None and self.async_scheduling:
            reason = "draft tokens depend on the tokens of the previous step"
            raise ValueError(f"speculative_config needs async_scheduling=False: {reason}")
        if self.logits_processors is not None and not isinstance(self.logits_processors, list | tuple):
            raise TypeError(f"logits_processors must be a list, got {self.logits_processors!r}")
        if not (self.trace is None or isinstance(self.trace, (str, Path)) or callable(self.trace)):
            raise TypeError(f"trace must be a path or a function, got {self.trace!r}")
        named = isinstance(self.scheduler_cls, str) and not {":", "."}.isdisjoint(self.scheduler_cls)
        if not (self.scheduler_cls is None or named or isinstance(self.scheduler_cls, type)):
            raise TypeError(f'scheduler_cls must be a class or "module:Class", got {self.scheduler_cls!r}')
        if self.hf_overrides is not None and not isinstance(self.hf_overrides, dict):
            raise TypeError(f"hf_overrides must be a dict of config.json's fields, got {self.hf_overrides!r}")
        if self.kv_store is not None:
            self._check_kv_store()
        if self.lora is not None and (not isinstance(self.lora, str | Path) or not str(self.lora)):
            raise TypeError(f"lora must be a directory with an adapter, got {self.lora!r}")
        for name in ("batch_invariant", "lora", "kv_store"):
            if getattr(self, name) not in (None, False) and self.tensor_parallel_size != 1:
                raise ValueError(f"{name} needs tensor_parallel_size=1, got {self.tensor_parallel_size}")
        if self.num_kv_blocks is not None and self.kv_cache_bytes is not None:
            raise ValueError("give num_kv_blocks or kv_cache_bytes, not both")

    def _check_kv_store(self) -> None:
        store = self.kv_store
        is_store = all(callable(getattr(store, name, None)) for name in ("get", "put", "touch", "delete"))
        if not is_store and not (isinstance(store, (str, Path)) and str(store)):
            others = "a redis:// address, or have the methods get, put, touch and delete"
            raise TypeError(f"kv_store must be a directory, {others}, got {store!r}")
        if not self.enable_prefix_caching:
            raise ValueError("kv_store needs enable_prefix_caching=True: it adds to the prefix cache")
        if self.trace is not None:
            raise ValueError("kv_store cannot be combined with trace, which does not record loaded blocks")

    @classmethod
    def add_cli_args(cls, parser: P) -> P:
        """Add a flag for each setting, and the defaults of `INSTEAD`, which vLLM's scripts read."""
        from nanoengine.flags import add_flags
        from nanoengine.unknown_arguments import INSTEAD

        target: Any = parser
        add_flags(target, cls)
        target.set_defaults(**{name: row[1] if row[1:] else None for name, row in INSTEAD.items()})
        defaults = {item.name: item.default for item in fields(cls)}
        target.set_defaults(**{name: value for name, value in defaults.items() if value is not MISSING})
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> Self:
        """Make a config from the parsed arguments. Attributes that are not settings are ignored."""
        from nanoengine.unknown_arguments import INSTEAD

        names = {*INSTEAD, *(item.name for item in fields(cls))}
        return cls(**{name: value for name, value in vars(args).items() if name in names})

    @property
    def speculation(self) -> "SpeculativeConfig | None":
        """The settings of `speculative_config`, validated. None: no speculative decoding."""
        if (given := self.speculative_config) is None:
            return None
        if not isinstance(given, dict):
            raise TypeError(f"speculative_config must be a dict, got {given!r}")
        from nanoengine.speculative_config import SpeculativeConfig

        return SpeculativeConfig(**given)

    @property
    def num_speculative_tokens(self) -> int:
        """The limit on draft tokens per sequence and step. 0: no speculative decoding."""
        return self.speculation.num_speculative_tokens if self.speculation is not None else 0

    def resolve_device(self) -> torch.device:
        """Return the PyTorch device to run on. Raises ValueError if it cannot be used."""
        name, device = self.device, None
        if name == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with suppress(RuntimeError, TypeError):
            device = torch.device(name)
        if device is None or device.type not in ("cpu", "cuda"):
            raise ValueError(f'device must be "auto", "cpu", "cuda" or "cuda:<index>", got {name!r}')
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f'device={name!r} needs CUDA, which this PyTorch cannot use; set device="cpu"')
        return device


def find_named(setting: str, name: str) -> Any:
    """Import and return what "module:name" or "module.name" names. Raises ValueError if it cannot."""
    module, _, attribute = name.rpartition(":" if ":" in name else ".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f'{setting} must be "module:name", got {name!r}: {error}') from None


EngineArgs = AsyncEngineArgs = EngineConfig  # vLLM's names
