"""Assembly: from an `EngineConfig` to a running core. Only this file chooses the device and the extensions.

    open          config.json, the tokenizer, the headers of the files          open_checkpoint
    load          the weights onto a device, and its kernels into the model     load
    size          the caches, by the memory that the largest steps leave        kv_cache_size.choose_sizes
    capture       decode steps as CUDA graphs, with the caches in place         allocate
    put together  the block manager, the scheduler and the core                 make_core

An extension is given what it needs as arguments. It never imports this file.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nanoengine.assembly_types import Loaded, Opened, Started
from nanoengine.backends.device import Decodes, Device, Forward
from nanoengine.backends.kv_cache import KVGroup
from nanoengine.backends.packing import Target
from nanoengine.checkpoints.checkpoint import open_checkpoint, resolve_dtype
from nanoengine.config import FILE_FORMATS, EngineConfig, find_named
from nanoengine.engine import BlockManager, EngineCore, ModelRunner, Scheduler
from nanoengine.kv_cache_size import choose_sizes, make_caches, trial_batch
from nanoengine.models.load import load_model
from nanoengine.sampling.sampler import CachedRows, sample_rows
from nanoengine.sampling_params import SamplingParams
from nanoengine.signals import before_shutdown, uninterrupted
from nanoengine.timing import Stopwatch, phase

if TYPE_CHECKING:  # at run time each is imported only for an engine that needs it
    from nanoengine.extensions.draft_model import DraftModel
    from nanoengine.extensions.parallel.tensor_parallel import Ranks
    from nanoengine.models.decoder import Decoder
    from nanoengine.models.hf import HFModel


@before_shutdown()
def start_model(
    config: EngineConfig, before_forward: Callable[[], object]
) -> "tuple[Started, DraftModel | None]":
    """Start the model, and its draft model or its other ranks if the config asks for them."""
    find_scheduler(config.scheduler_cls)  # raise its errors before the model is loaded
    checkpoint, asked = open_checkpoint(config), config.speculation
    opened = Opened(config, checkpoint, checkpoint.choose_length(config.max_model_len))
    if asked is not None and asked.model is not None:
        from nanoengine.extensions.draft_model import DraftModel, check_vocabulary, draft_config

        own = draft_config(config, asked)
        theirs = open_checkpoint(own)
        check_vocabulary(theirs, checkpoint)
        draft = Opened(own, theirs, min(opened.max_model_len, theirs.choose_length(None)))
        widths = theirs.vocab_size, checkpoint.vocab_size
        drafts = DraftModel(start_runner(draft, draft_widths=widths), asked)
        return start_runner(opened, before_forward, beside_bytes=drafts.block_bytes), drafts
    if config.tensor_parallel_size > 1:
        from nanoengine.extensions.parallel.tensor_parallel import start_ranks

        return start_ranks(start_runner, opened, before_forward), None
    return start_runner(opened, before_forward), None


def find_scheduler(given: type[Any] | str | None) -> type[Scheduler]:
    """Return the class that `scheduler_cls` names. Raises TypeError unless it is a `Scheduler`."""
    found = find_named("scheduler_cls", given) if isinstance(given, str) else given or Scheduler
    if not isinstance(found, type) or not issubclass(found, Scheduler):
        raise TypeError(f"scheduler_cls must be a subclass of nanoengine.engine.Scheduler, got {found!r}")
    return found


def start_runner(
    opened: Opened,
    before_forward: Callable[[], object] = lambda: None,
    ranks: "Ranks | None" = None,
    *,
    draft_widths: tuple[int, int] | None = None,
    beside_bytes: int = 0,
) -> Started:
    """Load a model on a device, size and allocate its KV cache and, if possible, capture CUDA graphs.

    `ranks` are the processes that share the model, if it is shared. A draft model has draft_widths: the sizes
    of its own vocabulary and the target model's. beside_bytes is what its K and V add to each block.
    """
    model, device, loaded = load(opened, ranks, draft_widths is not None)
    config, num_groups = opened.config, len(loaded.kv_groups)
    draw = device.draw
    if draw is None:
        from nanoengine.sampling.drawing import draw_rows

        draw = partial(draw_rows, unfiltered=device.draw_chunks)
    sample = partial(sample_rows, draw=draw, reports_processed=config.logprobs_mode == "processed_logprobs")
    with uninterrupted(), device.running():  # a backend may run a trial on the GPU
        attention = device.choose_attention(model.kv_specs, model.attention_settings)
        device.reserve(loaded.max_num_batched_tokens, loaded.max_num_chunks, num_groups, loaded.table_width)
        parts = model, device, attention, sample, loaded.block_size
        rows = CachedRows(config.max_num_seqs, loaded.max_model_len)
        make: Callable[..., ModelRunner] = ModelRunner
        if draft_widths is not None:
            from nanoengine.extensions.draft_model import DraftRunner

            make = partial(DraftRunner, *draft_widths)
        elif loaded.state_bytes:
            from nanoengine.extensions.recurrent_states import StatefulRunner

            make = partial(StatefulRunner, num_groups)
        elif num_groups > 1:
            from nanoengine.extensions.sliding_windows import WindowedRunner

            make = partial(WindowedRunner, num_groups)
        runner = make(*parts, sampling_rows=rows, before_forward=before_forward)
        started = choose_sizes(opened, runner, loaded, beside_bytes, lambda: capture(runner, loaded))
    allocate(started, started.num_blocks)
    runner.stopwatch = Stopwatch()  # trial runs do not count as steps
    return started


def load(opened: Opened, ranks: "Ranks | None", is_draft: bool) -> tuple["Decoder | HFModel", Device, Loaded]:
    """Load a model's weights onto its device, and give it the kernels of that device."""
    config, checkpoint, length = opened
    written = config.quantization if config.quantization in FILE_FORMATS else None
    if config.quantization is not None and checkpoint.quant_method != written:
        found = checkpoint.quant_method or "unquantized"
        asked = f"quantization={config.quantization!r}"
        raise ValueError(f"{asked} does not match the checkpoint, whose weights are {found}")
    with uninterrupted():  # a backend that fails in any way when it is tried is not used
        device = open_device(config) if ranks is None else ranks.wrap(open_device(config))
    pack = device.pack and uninterrupted()(device.pack)
    home, shard = device.device, None if ranks is None else ranks.shard
    with phase("kernels"):
        dtype = device.choose_dtype(resolve_dtype(config.dtype, checkpoint.hf_config))
    with phase("weights"):
        try:
            model = load_model(checkpoint, config, Target(dtype, home, pack), length, shard)
        except torch.OutOfMemoryError as error:
            from nanoengine.models.hf import describe_weights

            needed = describe_weights(checkpoint, config, dtype)
            raise ValueError(f"no room on {home} for the weights: {needed}; {error}") from error
    digest = b""
    if config.kv_store is not None:
        from nanoengine.extensions.kvstore.connector import digest_weights

        digest = digest_weights(model)  # before `prepare` packs them
    specs = model.kv_specs
    if config.kv_cache_dtype == "int8":
        from nanoengine.backends.int8_cache import in_int8

        specs = in_int8(specs)
    with phase("packing"), uninterrupted():
        device.prepare(model)
        if config.batch_invariant:
            from nanoengine.models.batch_invariant import make_exact
            from nanoengine.models.hf import HFModel

            if isinstance(model, HFModel):
                make_exact(model)
    groups = [KVGroup([*range(len(specs))], None)]
    if {spec.window for spec in specs} != {None} and not is_draft:  # a draft model has one group
        from nanoengine.extensions.sliding_windows import group_layers

        groups = group_layers(specs, length)
    states, block_size = getattr(model, "states", None), config.block_size or device.block_size
    loaded = Loaded(
        *(dtype, digest, specs, groups),
        state_bytes=0 if states is None else states.slot_bytes,
        block_size=block_size,
        max_model_len=length,
        table_width=-(-length // block_size),
        max_num_batched_tokens=config.max_num_batched_tokens or device.max_num_batched_tokens,
        max_num_chunks=config.max_num_seqs * (1 + config.num_speculative_tokens),
    )
    return model, device, loaded


def open_device(config: EngineConfig) -> Device:
    """Return the device that the config asks for. Only the module of that device is imported."""
    device = config.resolve_device()
    if device.type == "cuda":
        from nanoengine.backends.cuda import CUDA

        if device.index is None:  # steps may run in a thread with another current GPU
            device = torch.device("cuda", torch.cuda.current_device())
        return CUDA(device, config)
    from nanoengine.backends.cpu.cpu_device import CPU

    return CPU(device, config)


def allocate(started: Started, num_blocks: int) -> None:
    """Give a runner a KV cache of this many blocks, and capture its decode steps."""
    runner, loaded = started.runner, started.loaded
    with phase("KV cache"), uninterrupted(), runner.device.running():
        caches = make_caches(runner, loaded, num_blocks, started.num_state_slots)
        runner.set_caches(caches, lambda: capture(runner, loaded))


@torch.inference_mode()
def capture(runner: ModelRunner, loaded: Loaded) -> Forward:
    """Capture the decode steps of a runner with caches, if its parts and the device can be captured."""
    parts = ("attention", runner.attention.backend), ("model", runner.model)
    obstacles = ["its layers have recurrent states"] if loaded.state_bytes else []
    obstacles += [f"the {name} waits for the GPU" for name, part in parts if not part.capturable]
    decode = runner.build_inputs(trial_batch([1], SamplingParams(), [0], samples=False))
    largest = min(loaded.max_num_chunks, loaded.max_num_batched_tokens)
    return runner.device.capture(
        Decodes(
            *(decode, runner.compute, runner.model, runner.caches, loaded.max_num_batched_tokens),
            *(largest, loaded.table_width, loaded.block_size, obstacles),
        )
    )


def make_core(started: Started, draft_model: "DraftModel | None") -> EngineCore:
    """Put the runner, a block manager and a scheduler together: the plain ones, or those of extensions."""
    config, runner, loaded = started.opened.config, started.runner, started.loaded
    speculation = config.speculation
    if loaded.state_bytes:
        reasons = {"speculative_config": "a rejected draft token cannot be removed from a state"}
        for name, reason in (reasons | {"kv_store": "it stores only K and V"}).items():
            if getattr(config, name) is not None:
                raise ValueError(f"{name} does not support models with recurrent states: {reason}")
    blocks = make_blocks(started, draft_model)
    needed: type[Scheduler] = Scheduler  # by drafts or states
    needed_for, arguments = "", dict[str, Any]()
    if speculation is not None:
        arguments["max_drafting_seqs"] = speculation.max_drafting_seqs
    if draft_model is not None:
        from nanoengine.extensions.draft_model import ModelDraftingScheduler

        allocate(draft_model.started, started.num_blocks)
        needed, needed_for = ModelDraftingScheduler, "a draft model"
        arguments["draft_model"] = draft_model
    elif speculation is not None:
        from nanoengine.extensions.speculative_decoding import DraftingScheduler, NgramProposer
        from nanoengine.extensions.structured.token_masks import GrammarProposer

        needed, needed_for = DraftingScheduler, "speculative_config"
        arguments["propose"] = GrammarProposer(NgramProposer(speculation), config.num_speculative_tokens)
    elif loaded.state_bytes:
        from nanoengine.extensions.recurrent_states import StatefulRunner, StatefulScheduler

        assert isinstance(runner, StatefulRunner)
        needed, needed_for = StatefulScheduler, "models with recurrent states"
        arguments["spans"] = runner.spans
    chosen = needed if config.scheduler_cls is None else find_scheduler(config.scheduler_cls)
    if not issubclass(chosen, needed):
        raise ValueError(f"with {needed_for}, scheduler_cls must extend {needed.__name__}, got {chosen}")
    scheduler = chosen(
        blocks,
        **arguments,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=loaded.max_num_batched_tokens,
        max_model_len=loaded.max_model_len,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
    )
    is_async = runner.device.async_scheduling and speculation is None
    max_in_flight = int(is_async if config.async_scheduling is None else config.async_scheduling)
    if config.kv_store is None:
        return EngineCore(scheduler, runner, max_in_flight)
    from nanoengine.extensions.kvstore.connector import StoringCore

    return StoringCore(scheduler, runner, max_in_flight)


def make_blocks(started: Started, draft_model: "DraftModel | None") -> BlockManager:
    """Return the block manager. Most models have one group of layers, without a window."""
    config, loaded = started.opened.config, started.loaded
    sizes = started.num_blocks, loaded.block_size
    windows = [group.window for group in loaded.kv_groups]
    if draft_model is not None:
        windows[0] = None  # the draft model uses the first group's blocks, and may attend to all tokens
    settings: dict[str, Any] = {"enable_prefix_caching": config.enable_prefix_caching}
    if windows == [None] and config.kv_store is None and not loaded.state_bytes:
        return BlockManager(*sizes, **settings)
    from nanoengine.extensions.sliding_windows import WindowedBlockManager, WindowedRunner

    settings |= {"windows": windows, "max_chunk_tokens": loaded.max_num_batched_tokens}
    if isinstance(started.runner, WindowedRunner):
        settings["more_tables"] = started.runner.more_tables
    if config.kv_store is not None:
        from nanoengine.extensions.kvstore.connector import KVConnector, StoringBlockManager

        return StoringBlockManager(*sizes, connector=KVConnector(started), **settings)
    if loaded.state_bytes:
        from nanoengine.extensions.recurrent_states import StatefulBlockManager

        return StatefulBlockManager(*sizes, num_state_slots=started.num_state_slots, **settings)
    return WindowedBlockManager(*sizes, **settings)
