"""What vLLM's scripts set and nanoengine does not have: accepted where it asks for nothing, else refused.

Each table has a row per name. A value among those listed means "off", or what is done here anyway, and is
dropped; any other is refused with what to do instead. Tests hold the guide's page to these tables.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import signature
from itertools import combinations
from typing import Any, TypeVar

# name -> values accepted, what to do instead of others
Unserved = Mapping[str, tuple[tuple[Any, ...] | None, str]]
ANY = None  # in place of values: each is accepted, since none changes an answer, for the reason beside it
NO_MEDIA = [
    dict.fromkeys(kinds, 0) for n in range(4) for kinds in combinations(("image", "video", "audio"), n)
]
T = TypeVar("T")

# Of an engine. Beside a name that is served, None is accepted where vLLM's default is None.
ENGINE: Unserved = {
    "additional_config": ((None, {}), "there are no platform plugins"),
    "allowed_local_media_path": ((None, ""), "only text is served"),
    "attention_backend": ((None,), "use attn_backend"),
    "calculate_kv_scales": ((None, False), "the cache has the model's dtype"),
    "code_revision": ((None,), "give a directory as model"),
    "compilation_config": ((None, {}), "enforce_eager=True turns compiled kernels and graphs off"),
    "config_format": (("auto", "hf"), "give a checkpoint with a config.json"),
    "convert": (("auto", "none"), "only generation is served"),
    "cpu_offload_gb": ((None, 0), "give a smaller model or dtype"),
    "cudagraph_capture_sizes": ((None,), "leave it out: graphs are captured up to max_num_seqs"),
    "data_parallel_size": ((None, 1), "start a process per device"),
    "disable_async_output_proc": (ANY, "outputs are made in the step"),
    "disable_cascade_attn": (ANY, "there is no cascade attention"),
    "disable_custom_all_reduce": (ANY, "there is none: ranks reduce by NCCL or gloo"),
    "disable_log_requests": (ANY, "requests are not logged"),
    "disable_log_stats": (ANY, "nothing is logged; metrics() and get_metrics() always count"),
    "disable_sliding_window": ((None, False), "set max_model_len to the window's length"),
    "distributed_executor_backend": ((None, "uni", "mp"), "leave it out: ranks are processes, or torchrun's"),
    "download_dir": ((None,), "set HF_HOME, or give a directory as model"),
    "enable_chunked_prefill": ((None, True), "set max_num_batched_tokens to at least the longest prompt"),
    "enable_expert_parallel": ((None, False), "leave it out: one device holds all experts"),
    "enable_log_requests": ((None, False), "print what you send"),
    "enable_lora": ((None, False), "merge the adapter into the checkpoint"),
    "enable_prefix_caching": ((None,), ""),
    "enable_prompt_embeds": ((None, False), "prompts are text or token ids"),
    "enable_sleep_mode": ((None, False), "close() releases the memory"),
    "enforce_eager": ((None,), ""),
    "generation_config": ((None, "auto"), "leave it out and pass SamplingParams of your own"),
    "guided_decoding_backend": ((None, "auto", "guidance"), "structured outputs are made by llguidance"),
    "hf_config_path": ((None,), "put the config.json into the model's directory"),
    "hf_overrides": ((None, {}), "edit config.json in a copy of the checkpoint"),
    "hf_token": ((None,), "set HF_TOKEN, or run `hf auth login`"),
    "kv_cache_dtype": ((None, "auto"), "the cache has the model's dtype: set dtype"),
    "limit_mm_per_prompt": ((None, *NO_MEDIA), "only text is served"),
    "logprobs_mode": ((None, "raw_logprobs"), "log-probabilities are the model's, before any change"),
    "max_cudagraph_capture_size": ((None,), "leave it out: graphs are captured up to max_num_seqs"),
    "max_logprobs": (ANY, "a request may ask for as many as the vocabulary has"),
    "max_loras": ((None, 1), "merge the adapter into the checkpoint"),
    "max_num_seqs": ((None,), ""),
    "max_parallel_loading_workers": (ANY, "each rank loads its own weights"),
    "max_seq_len_to_capture": (ANY, "graphs do not depend on the length"),
    "mm_processor_kwargs": ((None, {}), "only text is served"),
    "model_loader_extra_config": ((None, {}), "weights are read from safetensors"),
    "override_generation_config": ((None, {}), "leave it out and pass SamplingParams of your own"),
    "pipeline_parallel_size": ((None, 1), "set tensor_parallel_size"),
    "preemption_mode": ((None, "recompute"), "preempted sequences are recomputed"),
    "prefix_caching_hash_algo": (ANY, "a hit is verified by its tokens"),
    "rope_scaling": ((None, {}), "edit config.json in a copy of the checkpoint"),
    "rope_theta": ((None,), "edit config.json in a copy of the checkpoint"),
    "runner": ((None, "auto", "generate"), "only generation is served"),
    "seed": ((None,), ""),
    "served_model_name": (ANY, "a flag of the server, not of the engine"),
    "skip_tokenizer_init": (
        (None, False),
        "token ids as prompts and SamplingParams(detokenize=False) use no tokenizer",
    ),
    "stream_interval": ((None, 1), "take every so many outputs"),
    "structured_outputs_config": ((None, {}), "structured outputs are made by llguidance"),
    "swap_space": (ANY, "preempted sequences are recomputed, never swapped"),
    "task": ((None, "auto", "generate"), "only generation is served"),
    "tokenizer_mode": ((None, "auto", "hf"), "the tokenizer is the one transformers loads"),
    "tokenizer_revision": ((None,), "give a directory as tokenizer"),
    "use_tqdm_on_load": (ANY, "loading shows no progress"),
    "use_v2_block_manager": (ANY, "there is one block manager"),
    "worker_cls": ((None, "auto"), "leave it out: there is one kind"),
}
RENAMED = {"num_gpu_blocks_override": "num_kv_blocks", "kv_cache_memory_bytes": "kv_cache_bytes"}

# Of SamplingParams.
SAMPLING: Unserved = {
    "best_of": ((None, 1), "ask for n samples with logprobs and keep the best"),
    "early_stopping": ((None, False), "beam search is not served"),
    "flat_logprobs": ((None, False), "leave it out: logprobs are a list of dicts"),
    "length_penalty": ((None, 1.0), "beam search is not served"),
    "logprob_token_ids": ((None,), "logprobs=-1 reports all tokens"),
    "repetition_detection": ((None,), "use frequency_penalty or repetition_penalty"),
    "skip_clone": (ANY, "a request always keeps a copy of its own"),
    "skip_reading_prefix_cache": ((None, False), "set enable_prefix_caching=False for the engine"),
    "spaces_between_special_tokens": ((None, True), "decode token_ids as you want them"),
    "stream_interval": ((None, 1), "take every so many outputs"),
    "thinking_token_budget": ((None, -1), "use max_tokens"),
    "truncate_prompt_tokens": ((None,), "cut the prompt's token ids"),
    "use_beam_search": ((None, False), "ask for n samples with logprobs and keep the best"),
}

# Of a call that makes requests: `generate`, `chat`, `add_request`.
CALL: Unserved = {
    "add_special_tokens": ((None, False), "the chat template writes them"),
    "arrival_time": ((None,), "requests are served in the order they are added"),
    "chat_template_content_format": (("auto",), "leave it out: the template is tried"),
    "data_parallel_rank": ((None, 0), "start a process per device"),
    "guided_options_request": ((None,), "set structured_outputs in SamplingParams"),
    "lora_request": ((None,), "merge the adapter into the checkpoint"),
    "mm_processor_kwargs": ((None, {}), "only text is served"),
    "prompt_adapter_request": ((None,), "put the text into the prompt"),
    "tokenization_kwargs": ((None, {}), "call the tokenizer and give token ids"),
    "trace_headers": ((None, {}), "there is no tracing"),
}

# Of a prompt that is a dict.
PROMPT: Unserved = {
    "cache_salt": ((None,), "set enable_prefix_caching=False for the engine"),
    "mm_processor_kwargs": ((None, {}), "only text is served"),
    "multi_modal_data": ((None, {}), "only text is served"),
    "multi_modal_uuids": ((None, {}), "only text is served"),
    "prompt_embeds": ((None,), "give text or token ids"),
}


def without_unserved(
    whose: str,
    given: Mapping[str, Any],
    served: Iterable[str],
    table: Unserved,
    renamed: Mapping[str, str] = {},
) -> dict[str, Any]:
    """What is left of the settings given when those that ask for nothing are dropped.

    Raises:
        ValueError: one that asks for something not served; the message says what to do instead.
        TypeError: one that nobody knows, or given under both of its names.
    """
    served, left = set(served), dict[str, Any]()
    for name, value in given.items():
        accepted, instead = table.get(name, ((), ""))
        if name in table and (accepted is ANY or value in accepted):
            continue
        if name in renamed and value is None:  # of old names, which ask for nothing then
            continue
        name = renamed.get(name, name)
        if name in left:
            raise TypeError(f"{whose} got {name} under two names")
        if name in served:
            left[name] = value
        elif name in table:
            raise ValueError(f"{name}={value!r} is not served: {instead}")
        else:
            near = difflib.get_close_matches(name, [*served, *table, *renamed], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{whose} has no argument {name!r}{hint}")
    return left


def accepts(table: Unserved, renamed: Mapping[str, str] = {}) -> Callable[[type[T]], type[T]]:
    """Let a class with keyword arguments only be made with those of the table too."""

    def decorate(cls: type[T]) -> type[T]:
        make = cls.__init__
        served = signature(make).parameters.keys() - {"self"}
        plain = served - table.keys()

        @wraps(make)
        def __init__(self: T, **given: Any) -> None:
            if not given.keys() <= plain:
                given = without_unserved(cls.__name__, given, served, table, renamed)
            make(self, **given)

        cls.__init__ = __init__  # type: ignore[assignment]
        return cls

    return decorate
