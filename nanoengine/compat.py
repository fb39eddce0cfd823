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
    "convert": (("auto", "none"), "set runner"),
    "cpu_offload_gb": ((None, 0), "give a smaller model or dtype"),
    "cudagraph_capture_sizes": ((None,), "leave it out: graphs are captured up to max_num_seqs"),
    "data_parallel_size": ((None, 1), "start a process per device"),
    "disable_async_output_proc": (ANY, "outputs are made in the step"),
    "disable_cascade_attn": (ANY, "there is no cascade attention"),
    "disable_chunked_mm_input": (ANY, "only text is served"),
    "disable_custom_all_reduce": (ANY, "there is none: ranks reduce by NCCL or gloo"),
    "disable_log_requests": (ANY, "requests are not logged"),
    "disable_log_stats": (ANY, "nothing is logged; metrics() and get_metrics() always count"),
    "disable_sliding_window": ((None, False), "set max_model_len to the window's length"),
    "distributed_executor_backend": (
        (None, "uni", "mp", "external_launcher"),
        "leave it out: ranks are processes, or torchrun's",
    ),
    "download_dir": ((None,), "set HF_HOME, or give a directory as model"),
    "enable_chunked_prefill": ((None, True), "set max_num_batched_tokens to at least the longest prompt"),
    "enable_dbo": ((None, False), "a step is one batch"),
    "enable_expert_parallel": ((None, False), "leave it out: one device holds all experts"),
    "enable_log_requests": ((None, False), "print what you send"),
    "enable_lora": ((None, False), "give lora=..., which is merged into the weights"),
    "enable_prefix_caching": ((None,), ""),
    "enable_prompt_embeds": ((None, False), "prompts are text or token ids"),
    "enable_sleep_mode": (ANY, "sleep and wake_up are always there"),
    "enforce_eager": ((None,), ""),
    "generation_config": ((None,), ""),
    "guided_decoding_backend": ((None, "auto", "guidance"), "structured outputs are made by llguidance"),
    "hf_config_path": ((None,), "put the config.json into the model's directory"),
    "hf_token": ((None,), "set HF_TOKEN, or run `hf auth login`"),
    "kv_cache_dtype": ((None, "auto"), "the cache has the model's dtype: set dtype"),
    "kv_offloading_size": ((None, 0), "set kv_store"),
    "kv_transfer_config": ((None, {}), "set kv_store"),
    "language_model_only": (ANY, "only text is served"),
    "limit_mm_per_prompt": ((None, *NO_MEDIA), "only text is served"),
    "max_cudagraph_capture_size": ((None,), "leave it out: graphs are captured up to max_num_seqs"),
    "max_long_partial_prefills": ((None, 1), "set long_prefill_token_threshold"),
    "max_lora_rank": (ANY, "there are no adapters"),
    "max_loras": ((None, 1), "give lora=..., which is merged into the weights"),
    "max_num_seqs": ((None,), ""),
    "max_num_partial_prefills": ((None, 1), "set long_prefill_token_threshold"),
    "max_parallel_loading_workers": (ANY, "each rank loads its own weights"),
    "max_seq_len_to_capture": (ANY, "graphs do not depend on the length"),
    "mm_processor_kwargs": ((None, {}), "only text is served"),
    "model_loader_extra_config": ((None, {}), "weights are read from safetensors"),
    "num_lookahead_slots": (ANY, "guesses take what is free"),
    "override_generation_config": ((None, {}), "leave it out and pass SamplingParams of your own"),
    "pipeline_parallel_size": ((None, 1), "set tensor_parallel_size"),
    "preemption_mode": ((None, "recompute"), "preempted sequences are recomputed"),
    "prefix_caching_hash_algo": (ANY, "a hit is verified by its tokens"),
    "profiler_config": ((None, {}), "set trace, or use a profiler on the process"),
    "reasoning_parser": ((None, ""), "a flag of the server, not of the engine"),
    "rope_scaling": ((None, {}), "set it in hf_overrides"),
    "rope_theta": ((None,), "set it in hf_overrides"),
    "runner": ((None,), ""),
    "seed": ((None,), ""),
    "served_model_name": (ANY, "a flag of the server, not of the engine"),
    "skip_tokenizer_init": (
        (None, False),
        "token ids as prompts and SamplingParams(detokenize=False) use no tokenizer",
    ),
    "stream_interval": ((None, 1), "take every so many outputs"),
    "structured_outputs_config": ((None, {}), "structured outputs are made by llguidance"),
    "swap_space": (ANY, "preempted sequences are recomputed, never swapped"),
    "task": ((None, "auto", "generate"), 'set runner="pooling"'),
    "tokenizer_mode": ((None, "auto", "hf"), "the tokenizer is the one transformers loads"),
    "tokenizer_revision": ((None,), "give a directory as tokenizer"),
    "use_tqdm_on_load": (ANY, "loading shows no progress"),
    "use_v2_block_manager": (ANY, "there is one block manager"),
    "weight_transfer_config": (
        (None, {}, {"backend": "gloo"}),
        "call update_weights, or start the server with --dev-mode: weights come over gloo",
    ),
    "worker_cls": ((None, "auto"), "leave it out: there is one kind"),
    "worker_extension_cls": ((None, ""), "give collective_rpc a function"),
}
# The rest of vLLM's, none of which is here -> the default, where that is more than None, False, 0 or empty.
FURTHER: dict[str, Any] = dict.fromkeys(
    """aggregate_engine_logging allow_deprecated_quantization allowed_media_domains attention_config
    aux_output_config collect_detailed_traces cp_kv_cache_interleave_size cpu_distributed_timeout_seconds
    cpu_offload_params cudagraph_metrics custom_histogram_buckets data_parallel_address
    data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank
    data_parallel_rpc_port data_parallel_size_local data_parallel_start_rank dcp_comm_backend dcp_q_replicate
    default_mm_loras device_ids diffusion_config disable_hybrid_kv_cache_manager
    disable_nccl_for_dp_synchronization distributed_timeout_seconds ec_manager_config ec_transfer_config
    elastic_ep_max_dp_size enable_batch_sharded_sampling enable_cumem_allocator enable_elastic_ep
    enable_ep_weight_filter enable_eplb enable_fault_tolerance enable_flashinfer_autotune enable_hc_sp
    enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_lora_bias
    enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_mfu_metrics
    enable_mixed_moe_lora_format enable_mm_embeds enable_mm_processor_stats enable_moe_shared_loras
    enable_nccl_comm_suspend enable_prompt_adapter enable_return_routed_experts enable_shm_tensor_arena
    enable_tower_connector_lora enable_trace_replay engram_config eplb_config fail_on_environ_validation
    fault_tolerance_config fully_sharded_loras gdn_prefill_backend interleave_mm_strings
    io_processor_plugin ir_op_priority jit_monitor_verbose kda_decode_backend kda_prefill_backend
    kernel_config kv_cache_dtype_skip_layers kv_cache_metrics kv_events_config kv_sharing_fast_prefill
    log_config_file log_level logging_config long_prefill_token_threshold_adaptive lora_target_modules
    mamba_block_size mamba_cache_mode mamba_cache_philox_rounds mamba_config mamba_ssu_algorithm
    max_cpu_loras max_lora_cls_labels max_num_active_seqs max_num_queued_reqs max_num_queued_tokens
    max_num_scheduled_tokens media_io_kwargs mm_encoder_attn_backend
    mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_only
    mm_ipc_gpu_memory_gb mm_processor_cache_type model_class_overrides model_weights monokernel node_rank
    numa_bind numa_bind_cpus numa_bind_nodes offload_group_size offload_params otlp_traces_endpoint
    override_neuron_config override_pooler_config prefix_cache_retention_interval
    prefix_match_unit qlora_adapter_name_or_path quantization_config ray_workers_use_nsight reasoning_config
    reasoning_parser_plugin return_sampling_mask safetensors_load_strategy scheduler_cls
    scheduler_delay_factor show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling
    sleep_mode_offload_cudagraph sleep_preserve_parameter_names spec_method spec_model spec_tokens
    specialize_active_lora tokenizer_pool_extra_config tokenizer_pool_size tokens_only ubatch_size
    use_fp64_gumbel use_replayssm video_pruning_rate watchdog_config watermark watermark_config""".split()  # noqa: SIM905
)
FURTHER |= {
    "all2all_backend": "allgather_reducescatter",
    "data_parallel_backend": "mp",
    "dcp_kv_cache_interleave_size": 1,
    "decode_context_parallel_size": 1,
    "ignore_patterns": ["original/**/*"],
    "linear_backend": "auto",
    "lora_dtype": "auto",
    "mamba_cache_dtype": "auto",
    "mamba_ssm_cache_dtype": "auto",
    "master_addr": "127.0.0.1",
    "master_port": 29501,
    "mm_device_do_normalize": True,
    "mm_encoder_tp_mode": "weights",
    "mm_processor_cache_gb": 4,
    "moe_backend": "auto",
    "nnodes": 1,
    "num_scheduler_steps": 1,
    "optimization_level": 2,
    "performance_mode": "balanced",
    "prefill_context_parallel_size": 1,
    "pt_load_map_location": "cpu",
    "renderer_num_workers": 1,
    "scheduler_reserve_full_isl": True,
    "sleep_mode_backend": "cumem",
    "swa_bounded_replay": True,
}
EVERY: Unserved = {
    name: ((None, False, "", {}, [], default), "nanoengine has nothing of the kind")
    for name, default in FURTHER.items()
} | dict(ENGINE)


def off(name: str) -> Any:
    """The value of an engine's unserved setting that stands for doing nothing, where possible not None.

    >>> off("enable_lora"), off("pipeline_parallel_size"), off("nnodes"), off("download_dir")
    (False, 1, 1, None)
    """
    accepted, _ = EVERY[name]
    return (
        FURTHER[name] if name in FURTHER else next((one for one in accepted or () if one is not None), None)
    )


RENAMED = {"num_gpu_blocks_override": "num_kv_blocks", "kv_cache_memory_bytes": "kv_cache_bytes"}

# Of SamplingParams.
SAMPLING: Unserved = {
    "best_of": ((None, 1), "ask for n samples with logprobs and keep the best"),
    "early_stopping": ((None, False), "beam search is not served"),
    "flat_logprobs": ((None, False), "leave it out: logprobs are a list of dicts"),
    "length_penalty": ((None, 1.0), "beam search is not served"),
    "logprob_token_ids": ((None,), "logprobs=-1 reports all tokens, with max_logprobs=-1"),
    "repetition_detection": ((None,), "use frequency_penalty or repetition_penalty"),
    "skip_clone": (ANY, "a request always keeps a copy of its own"),
    "skip_reading_prefix_cache": ((None, False), "set enable_prefix_caching=False for the engine"),
    "spaces_between_special_tokens": (ANY, "a fast tokenizer's own decoder puts none"),
    "stream_interval": ((None, 1), "take every so many outputs"),
    "thinking_token_budget": ((None, -1), "use max_tokens"),
    "use_beam_search": ((None, False), "ask for n samples with logprobs and keep the best"),
}

# Of a call that makes requests: `generate`, `chat`, `add_request`.
CALL: Unserved = {
    "add_special_tokens": ((None, False), "the chat template writes them"),
    "arrival_time": ((None,), "requests are served in the order they are added"),
    "chat_template_content_format": (("auto",), "leave it out: the template is tried"),
    "data_parallel_rank": ((None, 0), "start a process per device"),
    "guided_options_request": ((None,), "set structured_outputs in SamplingParams"),
    "lora_request": ((None,), "give lora=..., which is merged into the weights"),
    "mm_processor_kwargs": ((None, {}), "only text is served"),
    "prompt_adapter_request": ((None,), "put the text into the prompt"),
    "tokenization_kwargs": ((None, {}), "call the tokenizer and give token ids"),
    "trace_headers": ((None, {}), "there is no tracing"),
}

# Of the command `nanoengine serve`, beside the engine's.
SERVER: Unserved = {
    "allow_credentials": ((False,), "clients send their key as a header"),
    "allowed_headers": ((["*"],), "every header is allowed to allowed_origins"),
    "allowed_methods": ((["*"],), "every method is allowed to allowed_origins"),
    "api_server_count": ((1,), "there is one process"),
    "chat_template_content_format": (("auto",), "leave it out: the template is tried"),
    "default_chat_template_kwargs": (({},), "put chat_template_kwargs into the request"),
    "disable_fastapi_docs": (ANY, "there are none"),
    "disable_frontend_multiprocessing": (ANY, "there is one process"),
    "disable_uvicorn_access_log": (ANY, "there is none: the log has a line of JSON per request"),
    "enable_force_include_usage": ((False,), "put stream_options into the request"),
    "enable_log_deltas": (ANY, "no text is logged"),
    "enable_log_outputs": ((False,), "no text is logged"),
    "enable_prompt_tokens_details": (ANY, "they are always reported"),
    "enable_request_id_headers": (ANY, "each answer has its X-Request-Id"),
    "enable_server_load_tracking": ((False,), "ask /metrics"),
    "enable_ssl_refresh": ((False,), "TLS is left to a proxy"),
    "enable_tokenizer_info_endpoint": ((False,), "ask /tokenize"),
    "headless": ((False,), "there is one process"),
    "lora_modules": (([], {}), "give lora=..., which is merged into the weights"),
    "max_log_len": (ANY, "no text is logged"),
    "middleware": (([],), "put a proxy in front, or use nanoengine.apps.service.make_app"),
    "response_role": (("assistant",), "the answer's role is assistant"),
    "return_tokens_as_token_ids": ((False,), "put it into the request"),
    "root_path": (("",), "have the proxy cut it off"),
    "ssl_ca_certs": ((), "TLS is left to a proxy"),
    "ssl_cert_reqs": ((0,), "TLS is left to a proxy"),
    "ssl_certfile": ((), "TLS is left to a proxy"),
    "ssl_ciphers": ((), "TLS is left to a proxy"),
    "ssl_keyfile": ((), "TLS is left to a proxy"),
    "tool_parser_plugin": (("",), "nanoengine/apps/tools.py holds the formats"),
    "tool_server": ((), "clients run the tools"),
    "trust_request_chat_template": ((False,), "start the server with chat_template"),
    "uds": ((), "set host and port"),
    "uvicorn_log_level": (("info",), "stderr has the server's own lines"),
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
            raise ValueError(f"{name}={value!r:.80} is not served: {instead}")
        else:
            near = difflib.get_close_matches(name, {*served, *table, *renamed}, 1, 0.75)
            taken, _ = table.get(near[0] if near else "", ((value,), ""))  # no name that would be refused too
            hint = f"; did you mean {near[0]!r}?" if near and (taken is ANY or value in taken) else ""
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
