"""Defines `EngineConfig`, all settings of an engine, validated once."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from nanoengine.compat import ENGINE_IGNORES, INSTEAD, RENAMED, accepts
from nanoengine.sampling_params import check_bool, check_integer, check_number

P = TypeVar("P")


@accepts()
@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Holds the settings of speculative decoding. Names and defaults are vLLM's."""

    method: str  # "ngram": draft what followed the last tokens at an earlier occurrence (prompt lookup)
    num_speculative_tokens: int  # limit on draft tokens per sequence and step
    prompt_lookup_min: int | None = None  # shortest n-gram to look up; None: prompt_lookup_max, or 5
    prompt_lookup_max: int | None = None  # longest n-gram to look up; None: prompt_lookup_min, or 5

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.method != "ngram":
            raise ValueError(f'speculative_config["method"] must be "ngram", got {self.method!r}')
        check_integer("num_speculative_tokens", self.num_speculative_tokens, 1)
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        low, high = self.lookup_lengths
        if low > high:
            raise ValueError(f"prompt_lookup_min must be at most prompt_lookup_max, got {low} and {high}")

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """The lengths of the shortest and the longest n-gram to look up."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        return low or high or 5, high or low or 5


ROUNDED = "int8", "int4"  # formats that weights are quantized to at load time
WRITTEN = (
    "gptq",
    "awq",
    "compressed-tensors",
    "bitsandbytes",
    "gguf",
    "fp8",
    "mxfp4",
)  # formats of checkpoints that are quantized already


# Settings for which None, the default in vLLM, stands for the default here
OPTIONAL = "enable_prefix_caching", "enforce_eager", "generation_config", "max_num_seqs", "runner", "seed"


@accepts(ENGINE_IGNORES, RENAMED, OPTIONAL)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Holds all settings of an engine, like vLLM's EngineArgs. It is immutable.

    Raises:
        ValueError, TypeError: a setting is out of range or not supported. The message names it.
    """

    model: str | Path  # hub id or directory
    tokenizer: str | Path | None = None  # hub id or directory; None: the model's own
    revision: str | None = None  # branch, tag or commit of a hub model
    gguf_file: str | None = None  # which GGUF file to load from the directory or the hub
    dtype: str | torch.dtype = "auto"  # "auto": the checkpoint's own
    device: str = "auto"  # "auto": CUDA if available, else the CPU
    seed: int = 0  # for requests without their own seed
    max_model_len: int | None = None  # prompt plus output, in tokens; None: the model's maximum
    block_size: int | None = None  # tokens; None: 32 on a CPU, 256 on a GPU
    num_kv_blocks: int | None = None  # usable blocks; the null block is added to these
    kv_cache_bytes: int | None = None  # instead of num_kv_blocks; neither: sized by the free memory
    # For models with recurrent states: how many states to hold, for running sequences and the prefix cache
    num_state_slots: int | None = None
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory for weights, activations and cache
    max_num_seqs: int = 256  # limit on running sequences
    max_num_batched_tokens: int | None = None  # token budget of a step; None: 1024 on a CPU, 8192 on a GPU
    max_logprobs: int = 20  # limit on the logprobs a request may ask for per token; -1: no limit
    # "raw_logprobs": of the model's logits; "processed_logprobs": of the logits that tokens are drawn from
    logprobs_mode: str = "raw_logprobs"
    long_prefill_token_threshold: int = 0  # limit on the tokens of one sequence per step; 0: no limit
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"  # or "priority": a lower number runs first
    pin_threads: bool = True  # on a CPU: pin each PyTorch thread to a core while a step runs
    # "flash", "varlen", "triton", "compiled" or "torch"; "auto": the fastest that supports the model
    attn_backend: str = "auto"
    enforce_eager: bool = False  # plain PyTorch: no compiled kernels, no CUDA graphs
    async_scheduling: bool | None = None  # schedule a step while the previous one runs; None: on a GPU
    speculative_config: dict[str, Any] | None = None  # the fields of `SpeculativeConfig`
    # "int8", "int4": quantize the weights of linear layers, on a CPU. Or the checkpoint's own format
    quantization: str | None = None
    lora: str | Path | None = (
        None  # a directory with a PEFT adapter, which is merged into the weights at load time
    )
    tensor_parallel_size: int = 1  # processes that split every layer's weights: extensions/parallel.py
    load_format: str = "auto"  # "safetensors" means the same; "dummy": random weights, from config.json alone
    model_impl: str = (
        "auto"  # "nanoengine": models/decoder.py; "transformers": its own code; auto: the first that works
    )
    trust_remote_code: bool = False
    # "generate" text, or "pooling": embed, classify, score. "auto" decides by the checkpoint
    runner: str = "auto"
    pooler_config: dict[str, Any] | None = None  # "pooling_type": LAST, MEAN or CLS; "use_activation"
    hf_overrides: dict[str, Any] | None = None  # fields that override the checkpoint's config.json
    generation_config: str = "auto"  # default to the checkpoint's sampling parameters; "vllm": to vLLM's
    # For every request: functions as in SamplingParams, or classes as in vLLM V1 (contrib/processors.py)
    logits_processors: list[Any] | None = None
    # A file for JSON lines, or a function that is called with each event: extensions/trace.py
    trace: str | Path | Callable[[Any], Any] | None = None
    # Where to keep K and V beyond the life of the process: a directory, "redis://host:port/db", or an object
    # with the methods of `Store` in contrib/stores.py
    kv_store: Any = None

    def __post_init__(self) -> None:
        """Check ranges."""
        check_integer("max_num_seqs", self.max_num_seqs, 1)
        check_integer("tensor_parallel_size", self.tensor_parallel_size, 1)
        check_integer("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        check_integer("max_logprobs", self.max_logprobs, -1)
        lows = {"max_model_len": 2, "block_size": 1, "num_kv_blocks": 1, "kv_cache_bytes": 1}
        lows |= {"max_num_batched_tokens": 1, "num_state_slots": 1}
        for name, low in lows.items():
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), low, 2**62)
        check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, open_low=True)
        for name in ("enable_prefix_caching", "pin_threads", "enforce_eager", "trust_remote_code"):
            check_bool(name, getattr(self, name))
        if self.async_scheduling is not None:
            check_bool("async_scheduling", self.async_scheduling)
        if self.speculation is not None and self.async_scheduling:
            raise ValueError(
                "async_scheduling=True does not go with speculative_config: draft tokens depend on the "
                "tokens of the previous step. Leave async_scheduling out"
            )
        if self.logits_processors is not None:
            if not isinstance(self.logits_processors, list | tuple):
                raise TypeError(f"logits_processors must be a list, got {self.logits_processors!r}")
            if self.logits_processors and self.speculative_config:
                raise ValueError("speculative_config does not go with logits_processors of the engine")
        if not (self.trace is None or isinstance(self.trace, (str, Path)) or callable(self.trace)):
            raise TypeError(f"trace must be a path or take events, got {self.trace!r}")
        if self.hf_overrides is not None and not isinstance(self.hf_overrides, dict):
            raise TypeError(
                f"hf_overrides must be a dict of fields of config.json, got {self.hf_overrides!r}"
            )
        if self.pooler_config is not None:
            self._check_pooler_config(self.pooler_config)
        if self.kv_store is not None:
            self._check_kv_store()
        if self.lora is not None and (not isinstance(self.lora, str | Path) or not str(self.lora)):
            raise TypeError(f"lora must be a directory with an adapter, got {self.lora!r}")
        if self.lora is not None and self.tensor_parallel_size != 1:
            raise ValueError("lora needs tensor_parallel_size=1")
        if self.num_kv_blocks is not None and self.kv_cache_bytes is not None:
            raise ValueError("give num_kv_blocks or kv_cache_bytes, not both")
        if self.quantization not in (None, *ROUNDED, *WRITTEN):
            raise ValueError(
                f"quantization must be None or one of {', '.join((*ROUNDED, *WRITTEN))}, "
                f"got {self.quantization!r}; a checkpoint in few bits says itself how it is written"
            )
        choices = {
            "scheduling_policy": ("fcfs", "priority"),
            "logprobs_mode": ("raw_logprobs", "processed_logprobs"),
            "generation_config": ("auto", "vllm"),
            "runner": ("auto", "generate", "pooling"),
            "load_format": ("auto", "safetensors", "dummy"),
            "model_impl": (
                "auto",
                "vllm",
                "nanoengine",
                "transformers",
            ),  # "vllm", one of vLLM's values, means "auto" here
            "attn_backend": ("auto", "flash", "varlen", "triton", "compiled", "torch"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")

    @staticmethod
    def _check_pooler_config(given: Any) -> None:
        if not isinstance(given, dict) or not given.keys() <= {"pooling_type", "use_activation"}:
            raise TypeError(f"pooler_config must be a dict of pooling_type and use_activation, got {given!r}")
        if given.get("pooling_type", "LAST") not in ("LAST", "MEAN", "CLS"):
            raise ValueError(f"pooling_type must be LAST, MEAN or CLS, got {given['pooling_type']!r}")
        if "use_activation" in given:
            check_bool("use_activation", given["use_activation"])

    def _check_kv_store(self) -> None:
        store = self.kv_store
        is_store = all(callable(getattr(store, name, None)) for name in ("get", "put", "touch", "delete"))
        if not is_store and not (isinstance(store, (str, Path)) and str(store)):
            raise TypeError(
                "kv_store must be a directory, a redis:// address, or have the methods get, put, touch and "
                f"delete, got {store!r}"
            )
        if not self.enable_prefix_caching:
            raise ValueError("kv_store needs enable_prefix_caching=True: it adds to the prefix cache")
        if self.trace is not None:
            raise ValueError("trace does not go with kv_store: it has no word for blocks that are loaded")
        if self.tensor_parallel_size != 1:
            raise ValueError("kv_store needs tensor_parallel_size=1: a rank has its own heads' K and V alone")

    @classmethod
    def add_cli_args(cls, parser: P) -> P:
        """Add a flag for each setting to an argument parser, or to an argument group.

        Settings in `compat.INSTEAD` get their defaults, because vLLM's scripts read them.
        """
        from nanoengine.flags import add_flags  # only commands need it

        target: Any = parser
        add_flags(target, cls)
        target.set_defaults(**{name: row[1] if row[1:] else None for name, row in INSTEAD.items()})
        target.set_defaults(
            **{item.name: item.default for item in fields(cls) if item.default is not MISSING}
        )
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> Self:
        """Make a config from the parsed arguments. Attributes that are not settings are ignored."""
        names = {*INSTEAD, *(item.name for item in fields(cls))}
        return cls(**{name: value for name, value in vars(args).items() if name in names})

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The settings of `speculative_config`, validated. None: no speculative decoding."""
        given = self.speculative_config
        if given is not None and not isinstance(given, dict):
            raise TypeError(f"speculative_config must be a dict, got {given!r}")
        return SpeculativeConfig(**given) if given is not None else None

    @property
    def num_speculative_tokens(self) -> int:
        """The limit on draft tokens per sequence and step. 0: no speculative decoding."""
        return self.speculation.num_speculative_tokens if self.speculation is not None else 0

    def resolve_device(self) -> torch.device:
        """Return the PyTorch device to run on.

        Raises:
            ValueError: it is neither a CPU nor a CUDA device, or CUDA is not available.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError):
            device = None
        if device is None or device.type not in ("cpu", "cuda"):
            raise ValueError(
                f'device must be "auto", "cpu" or "cuda", with an index or not, got {self.device!r}'
            )
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device must be one this PyTorch can use, got {self.device!r} without CUDA")
        return device


EngineArgs = AsyncEngineArgs = VllmConfig = EngineConfig  # vLLM's names
