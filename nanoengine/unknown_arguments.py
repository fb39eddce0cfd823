"""Defines how unknown argument names are handled, so that scripts and clients written for vLLM run.

A name that resembles a supported one is a typo: it raises TypeError at any value. Any other unknown name is
ignored if its value is a no-op, such as None or False, and refused otherwise. `INSTEAD` names alternatives.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

MAX_UNSERVED = 300  # limit on unknown names per call: each is compared with every supported name

RENAMED = {"num_gpu_blocks_override": "num_kv_blocks", "kv_cache_memory_bytes": "kv_cache_bytes"}

# Name in vLLM or OpenAI -> what to write here instead, then the accepted values, if not those of the rule
INSTEAD: dict[str, tuple[Any, ...]] = {
    "attention_backend": ("use attn_backend",),
    "best_of": ("request n samples with logprobs and keep the best", 1),
    "compilation_config": ("set enforce_eager=True to turn off compiled kernels and graphs", {}),
    "data_parallel_size": ("start one process per device", 1),
    "distributed_executor_backend": ("leave it out; ranks are processes", "mp", "uni"),
    "enable_chunked_prefill": ("set max_num_batched_tokens to at least the longest prompt's length", True),
    "enable_lora": ("pass lora=...; the adapter is merged into the weights", False),
    "guided_decoding": ("use structured_outputs",),
    "include_reasoning": ("read only content", True),
    "kv_transfer_config": ("set kv_store",),
    "length_penalty": ("it is a setting of beam search only", 1.0, 1),
    "limit_mm_per_prompt": ("prompts are text only",),
    "lora_request": ("pass lora=...; the adapter is merged into the weights",),
    "max_loras": ("pass lora=...; the adapter is merged into the weights", 1),
    "modalities": ("answers are text only", ["text"]),
    "optimization_level": ("set enforce_eager=True to turn off compiled kernels and graphs", 2),
    "pipeline_parallel_size": ("set tensor_parallel_size", 1),
    "previous_response_id": ("send the conversation as input",),
    "profiler_config": ("set trace, or use a profiler on the process",),
    "rope_scaling": ("set it in hf_overrides",),
    "runner": ("nanoengine only generates text", "auto", "generate"),
    "task": ("nanoengine only generates text", "auto", "generate"),
    "thinking_token_budget": ("use max_tokens", -1),
    "tokenizer_mode": ("leave it out; transformers loads the tokenizer", "auto", "hf"),
    "truncation": ("shorten the input", "disabled"),
    "verbosity": ("ask for it in a message", "medium"),
}
# Names that are accepted at any value, because outputs do not depend on them here.
IGNORED: dict[str, tuple[str, ...]] = {
    "engine": (
        *("disable_custom_all_reduce", "disable_log_requests", "disable_log_stats"),
        *("max_lora_rank", "max_seq_len_to_capture", "served_model_name", "swap_space"),
    ),
    "sampling": ("spaces_between_special_tokens",),
    "server": ("enable_prompt_tokens_details",),
    "request": ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "user"),
}


def is_noop_value(value: Any) -> bool:
    """Return whether a value is None, False, 0, "", "auto", "none", or a container of nothing else."""
    if isinstance(value, dict):
        return all(map(is_noop_value, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return not value
    return value is None or (isinstance(value, (int, float, str)) and value in (0, "", "auto", "none"))


def without_unserved(
    owner: str, given: Mapping[str, Any], served: Iterable[str], ignored: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the supported settings, under their names here. Drops unknown ones that are a no-op.

    Raises TypeError for a typo, an unknown name with an effect, or a name given twice; and ValueError for an
    unsupported value of a name in `INSTEAD`.
    """
    renamed = {old: new for old, new in RENAMED.items() if new in served}
    served, left = {*served, *renamed}, dict[str, Any]()
    if len(given.keys() - served) > MAX_UNSERVED:
        raise TypeError(f"{owner} has more than {MAX_UNSERVED} unknown arguments")
    for name, value in given.items():
        if name in renamed and value is None:
            continue
        if name in served:
            name = renamed.get(name, name)
            if name in left:
                raise TypeError(f"{owner} got {name} under two names")
            left[name] = value
        elif name in INSTEAD:
            instead, *accepted = INSTEAD[name]
            # The types count too: 1 == True, and 0 == False.
            is_off = any(type(value) is type(one) and value == one for one in (None, *accepted))
            if not is_off and (accepted or not is_noop_value(value)):
                raise ValueError(f"{name}={value!r:.80} is not supported; {instead}")
        elif name not in ignored:
            if near := difflib.get_close_matches(str(name)[:100], served, 1, 0.8):
                raise TypeError(f"{owner} has no argument {name!r}; did you mean {near[0]!r}?")
            if not is_noop_value(value):
                raise TypeError(f"{owner} has no argument {name!r}; {name}={value!r:.80} is not supported")
    return left
