"""Chooses the sizes of the caches: how many KV blocks, and how many slots of recurrent states, fit in memory.

The user gives a number of blocks or of bytes. Otherwise a trial runs the steps that need the most memory, and
the device says what they leave for the caches.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nanoengine.assembly_types import Loaded, Opened, Started
from nanoengine.backends.device import Forward, Trial
from nanoengine.backends.kv_cache import KVCache, block_bytes, new_caches
from nanoengine.backends.step_inputs import NUM_RESERVED_SLOTS
from nanoengine.config import EngineConfig
from nanoengine.engine import Chunk, ModelRunner, ScheduledBatch, Sequence
from nanoengine.sampling_params import SamplingParams

MAX_FREE_BLOCKS = 1 << 16  # for models without a KV cache: blocks only identify prefixes


def choose_sizes(
    opened: Opened, runner: ModelRunner, loaded: Loaded, beside_bytes: int, capture: Callable[[], Forward]
) -> Started:
    """Choose the number of blocks and of state slots: the user's, or what the memory has room for.

    The memory must have room for the largest steps and for the graphs that `capture` makes as well.
    beside_bytes is how much a draft model's K and V add to each block.
    """
    config, device, specs, state_bytes = opened.config, runner.device, loaded.kv_specs, loaded.state_bytes
    counts = [config.num_kv_blocks, *([config.num_state_slots] if state_bytes else [])]
    is_sized = config.kv_cache_bytes is not None or None not in counts
    trial = plan_trial(config, runner, loaded, capture)
    cache_bytes = config.kv_cache_bytes or (0 if is_sized else device.free_bytes(trial))
    if is_sized:
        device.warm_up(trial)
    num_slots = 0
    if state_bytes:
        # One state per sequence that can run at once, and as many again for the prefix cache.
        share, most = cache_bytes // (2 if specs else 1), 2 * config.max_num_seqs
        num_slots = config.num_state_slots or runner.model.states.count_slots(most, share)
    taken = (num_slots + NUM_RESERVED_SLOTS) * state_bytes
    if specs:
        one_bytes = block_bytes(specs, loaded.kv_groups, loaded.block_size) + beside_bytes
        max_blocks = config.max_num_seqs * loaded.table_width * len(loaded.kv_groups)
        num_blocks = device.count_blocks(one_bytes, max_blocks, cache_bytes - taken)
        taken += (num_blocks + 1) * one_bytes
    else:
        num_blocks = config.num_kv_blocks or MAX_FREE_BLOCKS
    memory = device.find_memory()
    if memory is not None and taken > memory.num_bytes // config.tensor_parallel_size:
        asked = f"{num_slots + NUM_RESERVED_SLOTS} states and " if num_slots else ""
        raise ValueError(
            f"too little memory for {asked}a KV cache of {num_blocks} blocks of {loaded.block_size} tokens: "
            f"{taken / 2**30:.1f} GiB needed, {memory}; "
            f"lower {'num_state_slots, ' if num_slots else ''}num_kv_blocks or kv_cache_bytes"
        )
    shown = "" if memory is None or is_sized else f"{taken / 2**30:.1f} GiB of the {memory}"
    return Started(opened, runner, loaded, num_blocks, num_slots, shown)


def plan_trial(
    config: EngineConfig, runner: ModelRunner, loaded: Loaded, capture: Callable[[], Forward]
) -> Trial:
    """Return a trial of the steps that need the most memory: the longest prompts, and the most decodes."""
    budget, rows_per_seq = loaded.max_num_batched_tokens, 1 + config.num_speculative_tokens
    longest = min(loaded.max_model_len - 1, budget)  # leaves room for an output token
    prompts = [longest] * (budget // longest) + [budget % longest]
    prompts = [length for length in prompts if length][: config.max_num_seqs]
    decodes = [1] * max(1, min(loaded.max_num_chunks, budget) // rows_per_seq)
    block_ids = list(range(1, -(-prompts[0] // runner.block_size) + 1))  # shared by all sequences
    most_work = SamplingParams(top_p=0.5, min_p=0.1, repetition_penalty=1.1, logprobs=1)
    batches = [
        trial_batch(prompts, SamplingParams(top_k=20), block_ids),
        trial_batch(decodes, most_work, block_ids, rows=rows_per_seq),
    ]

    @contextmanager
    def caches() -> Iterator[int]:
        runner.set_caches(make_caches(runner, loaded, len(block_ids)))
        memory = {id(x): x.nbytes for cache in runner.caches for x in (cache.k, cache.v)}  # groups share it
        try:
            yield sum(memory.values())
        finally:
            runner.set_caches([])

    def compute() -> None:
        for batch in batches:
            runner.collect(runner.launch(batch))

    what = f"{len(prompts)} prompts of up to {prompts[0]} tokens"
    return Trial(what, caches, compute, capture)


def make_caches(runner: ModelRunner, loaded: Loaded, num_blocks: int, num_slots: int = 0) -> list[KVCache]:
    """Allocate a KV cache per layer and, inside the model, the slots of its recurrent states."""
    device = runner.device.device
    if loaded.state_bytes:
        runner.model.states.allocate(num_slots + NUM_RESERVED_SLOTS, device)
    return new_caches(loaded.kv_specs, loaded.kv_groups, num_blocks, loaded.block_size, device)


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
