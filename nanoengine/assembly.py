"""Startup: chooses a device, loads the weights onto it, and sets the KV cache's size and the token budget."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from nanoengine.backends.device import Decodes, Device, Forward, Trial
from nanoengine.backends.kv_cache import KVCache, KVGroup, KVSpec, block_bytes, group_layers, new_caches
from nanoengine.backends.step_inputs import NUM_RESERVED_SLOTS
from nanoengine.checkpoints.checkpoint import Checkpoint, resolve_dtype
from nanoengine.config import FILE_FORMATS, EngineConfig
from nanoengine.engine import Chunk, ModelRunner, ScheduledBatch, Sequence
from nanoengine.models.load import load_model
from nanoengine.sampling.sampler import CachedRows, draw_rows, sample_rows, scale_logits, sort_keys
from nanoengine.sampling_params import SamplingParams
from nanoengine.signals import uninterrupted
from nanoengine.started import Started
from nanoengine.timing import phase

MAX_FREE_BLOCKS = 1 << 16  # for models without a KV cache: blocks only identify prefixes


def start_runner(
    config: EngineConfig,
    checkpoint: Checkpoint,
    max_model_len: int,
    *,
    choose_runner: Callable[[list[KVGroup], bool], Callable[..., ModelRunner]],
    shard: Any = None,
    wrap: Callable[[Device], Device] = lambda device: device,
    group: Callable[[list[KVSpec], int], list[KVGroup]] = group_layers,
    beside_bytes: int = 0,
    before_forward: Callable[[], object] = lambda: None,
) -> Started:
    """Load a model on a device, allocate its KV cache and, if possible, capture CUDA graphs.

    `choose_runner` is given the groups of layers and whether the model has recurrent states, and returns the
    runner class. If several processes share one model, `shard` is the part to load, and `wrap` adds the
    communication between them to the device. `group` divides the layers into groups. beside_bytes is how
    much a draft model's K and V add to each block. The runner calls `before_forward`.

    Raises:
        ValueError: the checkpoint or a setting is not supported, or there is too little memory.
    """
    written = config.quantization if config.quantization in FILE_FORMATS else None
    if config.quantization is not None and checkpoint.quant_method != written:
        found = checkpoint.quant_method or "unquantized"
        raise ValueError(
            f"quantization={config.quantization!r} does not match the checkpoint, whose weights are {found}"
        )
    with uninterrupted():  # a backend that fails in any way when it is tried is not used
        device = wrap(open_device(config))
    pack = device.pack and uninterrupted()(device.pack)
    torch_device = device.device
    with phase("kernels"):
        dtype = device.choose_dtype(resolve_dtype(config.dtype, checkpoint.hf_config))
    where: dict[str, Any] = {"dtype": dtype, "device": torch_device, "max_model_len": max_model_len}
    with phase("weights"):
        try:
            model = load_model(checkpoint, config, **where, shard=shard, pack=pack)
        except torch.OutOfMemoryError as error:
            from nanoengine.models.load import describe_weights

            needed = describe_weights(checkpoint, config, dtype, shard)
            raise ValueError(f"no room on {torch_device} for the weights: {needed}; {error}") from error
    digest = b""
    if config.kv_store is not None:
        from nanoengine.models.load import digest_weights

        digest = digest_weights(model)  # before `prepare` packs them
    specs = model.kv_specs
    if config.kv_cache_dtype == "int8":
        from nanoengine.backends.int8_cache import in_int8

        specs = in_int8(specs)
    groups = group(specs, max_model_len)
    states = getattr(model, "states", None)
    has_states, state_bytes = states is not None, 0 if states is None else states.slot_bytes
    with phase("packing"), uninterrupted():
        device.prepare(model)
        if device.is_exact:
            from nanoengine.models.batch_invariant import make_exact
            from nanoengine.models.hf import HFModel

            if isinstance(model, HFModel):
                make_exact(model)
    draw = device.draw or partial(draw_rows, scale=device.fuse(scale_logits), rank=device.fuse(sort_keys))
    is_processed = config.logprobs_mode == "processed_logprobs"
    sample = partial(sample_rows, draw=draw, reports_processed=is_processed)
    block_size = config.block_size or device.block_size
    max_num_tokens = config.max_num_batched_tokens or device.max_num_batched_tokens
    rows_per_seq = 1 + config.num_speculative_tokens
    max_num_chunks = config.max_num_seqs * rows_per_seq
    table_width = -(-max_model_len // block_size)  # blocks of the longest sequence
    with uninterrupted(), device.running():  # a backend may run a trial on the GPU
        attention = device.choose_attention(model.kv_specs, model.attention_settings)
        device.reserve(max_num_tokens, max_num_chunks, len(groups), table_width)
        runner = choose_runner(groups, states is not None)(
            *(model, device, attention, sample, block_size),
            rows=CachedRows(config.max_num_seqs, max_model_len),
            before_forward=before_forward,
        )

        # `Started` keeps these functions. They reach the model by way of the runner, so `close` can free it.
        def make_caches(num_blocks: int, num_slots: int = 0) -> list[KVCache]:
            if has_states:
                runner.model.states.allocate(num_slots + NUM_RESERVED_SLOTS, torch_device)
            return new_caches(specs, groups, num_blocks, block_size, torch_device)

        @torch.inference_mode()
        def capture() -> Forward:
            parts = ("attention", attention.backend), ("model", runner.model)
            obstacles = ["its layers have recurrent states"] if has_states else []
            obstacles += [f"the {name} waits for the GPU" for name, part in parts if not part.capturable]
            decode = runner.build_inputs(trial_batch([1], SamplingParams(), [0], samples=False))
            largest = min(max_num_chunks, max_num_tokens)
            return device.capture(
                Decodes(decode, runner.compute, largest, table_width, block_size, obstacles)
            )

        longest = min(max_model_len - 1, max_num_tokens)  # leaves room for an output token
        prompts = [longest] * (max_num_tokens // longest) + [max_num_tokens % longest]
        prompts = [length for length in prompts if length][: config.max_num_seqs]
        decodes = [1] * max(1, min(max_num_chunks, max_num_tokens) // rows_per_seq)
        trial = plan_trial(runner, prompts, decodes, rows_per_seq, make_caches, capture)
        counts = [config.num_kv_blocks, *([] if states is None else [config.num_state_slots])]
        is_sized = config.kv_cache_bytes is not None or None not in counts
        cache_bytes = config.kv_cache_bytes or (0 if is_sized else device.free_bytes(trial))
        if is_sized:
            device.warm_up(trial)
        num_slots, bytes_left = 0, cache_bytes
        if states is not None:
            # One state per sequence that can run at once, and as many again for the prefix cache.
            share = cache_bytes // (2 if specs else 1)
            num_slots = config.num_state_slots or states.count_slots(2 * config.max_num_seqs, share)
            bytes_left -= (num_slots + NUM_RESERVED_SLOTS) * state_bytes
        one_bytes = block_bytes(specs, groups, block_size) + beside_bytes if specs else 0
        if specs:
            max_blocks = config.max_num_seqs * table_width * len(groups)
            num_blocks = device.count_blocks(one_bytes, max_blocks, bytes_left)
        else:
            num_blocks = config.num_kv_blocks or MAX_FREE_BLOCKS
        taken = (num_blocks + 1) * one_bytes + (num_slots + NUM_RESERVED_SLOTS) * state_bytes
        memory = device.find_memory()
        if memory is not None and taken > memory.num_bytes // config.tensor_parallel_size:
            asked = f"{num_slots + NUM_RESERVED_SLOTS} states and " if num_slots else ""
            raise ValueError(
                f"too little memory for {asked}a KV cache of {num_blocks} blocks of {block_size} tokens: "
                f"{taken / 2**30:.1f} GiB needed, {memory}; "
                f"lower {'num_state_slots, ' if num_slots else ''}num_kv_blocks or kv_cache_bytes"
            )
        is_chosen = memory is not None and None in counts and config.kv_cache_bytes is None
        shown = f"{taken / 2**30:.1f} GiB of the {memory}" if is_chosen else ""

    def allocate(num_blocks: int) -> None:
        with phase("KV cache"), uninterrupted(), device.running():
            runner.set_caches(make_caches(num_blocks, num_slots), capture)

    allocate(num_blocks)
    runner.stopwatch.clear()  # trial runs do not count as steps
    sizes = num_blocks, max_num_tokens, dtype, specs, groups, digest, num_slots, state_bytes
    return Started(runner, *sizes, shown, allocate)


def open_device(config: EngineConfig) -> Device:
    """Return the device that the config asks for. Only the module of that device is imported."""
    device = config.resolve_device()
    if device.type == "cuda":
        from nanoengine.backends.cuda import CUDA

        if device.index is None:  # steps may run in a thread with another current GPU
            device = torch.device("cuda", torch.cuda.current_device())
        return CUDA(device, config)
    try:
        from nanoengine.backends.cpu.cpu_device import CPU
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("nanoengine.backends.cpu"):
            raise
        logging.getLogger(__name__).warning("nanoengine/backends/cpu is missing: no compiled kernels")
        return Device(device, config)
    return CPU(device, config)


def plan_trial(
    runner: ModelRunner,
    prompts: list[int],
    decodes: list[int],
    rows_per_seq: int,
    make_caches: Callable[[int], list[KVCache]],
    capture: Callable[[], Forward],
) -> Trial:
    """Return a trial of the steps that need the most memory: the longest prompts, and the most decodes.

    `prompts` and `decodes` are the chunk lengths of these steps. With draft tokens, each decode has
    rows_per_seq rows. The runner must not have caches yet.
    """
    block_ids = list(range(1, -(-prompts[0] // runner.block_size) + 1))  # shared by all sequences
    most_work = SamplingParams(top_p=0.5, min_p=0.1, repetition_penalty=1.1, logprobs=1)
    # Fused functions are compiled once for many rows and once for one row. Do both now, before any request.
    sizes = (prompts, decodes, rows_per_seq), (prompts[:1], decodes[:1], 1)
    batches = [
        trial_batch(lengths, params, block_ids, rows=rows)
        for of_prompts, of_decodes, num_rows in sizes
        for lengths, params, rows in (
            (of_prompts, SamplingParams(top_k=20), 1),
            (of_decodes, most_work, num_rows),
        )
    ]

    @contextmanager
    def caches() -> Iterator[int]:
        runner.set_caches(make_caches(len(block_ids)))
        memory = {id(x): x.nbytes for cache in runner.caches for x in (cache.k, cache.v)}  # groups share it
        try:
            yield sum(memory.values())
        finally:
            runner.set_caches([])

    def compute() -> None:
        for batch in batches:
            runner.collect(runner.launch(batch))

    return Trial(f"{len(prompts)} prompts of up to {prompts[0]} tokens", caches, compute, capture)


def trial_batch(
    lengths: list[int], params: SamplingParams, block_table: list[int], samples: bool = True, rows: int = 1
) -> ScheduledBatch:
    """Return a batch of sequences of these lengths in the same blocks. Each chunk occurs `rows` times."""
    chunks: list[Chunk] = []
    for length in lengths:
        seq = Sequence(len(chunks), [0] * length, params)
        seq.block_table = block_table
        chunks += [Chunk(seq, 0, length, samples, seq.token_ids)] * rows
    return ScheduledBatch(chunks, [chunk.seq for chunk in chunks] if samples else [], rows * sum(lengths))
