"""Draft models: a smaller model with the same vocabulary proposes the draft tokens. vLLM's "draft_model".

A block holds the K and V of both models for its tokens. So allocation, prefix hits, preemptions and aborts
apply to both. But the draft model computes fewer tokens, in passes of its own: one pass per depth, for all
sequences. `Shadow.num_computed` is the number of a sequence's tokens that it has computed, and
`DraftModel.computed_blocks` contains the registered blocks that hold its K and V. The first pass of a step
also computes the known tokens that it has not computed yet. Example, with one pass between semicolons:

    known tokens  it computes      drafts   sampled    its K and V afterwards
    a b c         a b c; d; e      d e u    d e f      a b c d e
    ... d e f     f; g; v          g v w    g h        ... f g v   (the next h overwrites v)

A draft is sampled like the target model's token at its position: with the same settings, random number and
grammar. So a draft is often right if the two models' probabilities are close, and always if they are equal.
Source: https://arxiv.org/abs/2211.17192
"""

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from operator import eq
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch

from nanoengine.assembly_types import Started
from nanoengine.backends.kv_cache import block_bytes
from nanoengine.checkpoints.checkpoint import Checkpoint
from nanoengine.config import EngineConfig
from nanoengine.engine import Block, Chunk, ModelRunner, Prefix, ScheduledBatch, Sequence
from nanoengine.extensions.speculative_decoding import DraftingScheduler
from nanoengine.extensions.structured.token_masks import Constraint
from nanoengine.speculative_config import SpeculativeConfig


@dataclass(slots=True, eq=False)
class Shadow:
    """Holds the draft model's state for one sequence."""

    view: Sequence  # given to the runner: the same blocks and settings, and tokens that may end in drafts
    num_computed: int = 0  # view.block_table has the draft model's K and V of this many tokens
    num_known: int = 0  # the number of known tokens when the last drafts were computed
    drafts: list[int] = field(default_factory=list)  # the last drafts, which follow those tokens

    @classmethod
    def of(cls, seq: Sequence) -> Self:
        """Return a new shadow. Its view has its own copy of the grammar, and no other processors."""
        grammars = [Constraint(x.grammars, x.grammar) for x in seq.processors if isinstance(x, Constraint)]
        same = {name: getattr(seq, name) for name in ("seed", "stop_ids", "bad_words")}
        view = Sequence(seq.seq_id, [], replace(seq.params, logprobs=None), processors=(*grammars,), **same)
        view.num_prompt_tokens = seq.num_prompt_tokens
        return cls(view)

    def compare(self, token_ids: list[int]) -> None:
        """Compare the last drafts with the sampled tokens, and discard the K and V of wrong drafts."""
        if sampled := token_ids[self.num_known :]:
            num_right = sum(takewhile(bool, map(eq, sampled, self.drafts)))
            self.num_computed = self.num_known + min(num_right, len(self.drafts) - 1)  # the last has none
            self.drafts = []


class DraftRunner(ModelRunner):
    """Runs the draft model. Pads or cuts its logits to the width of the target model's logits."""

    def __init__(self, own_width: int, target_width: int, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.own_width = own_width
        if missing := target_width - own_width:  # if negative, columns are removed
            sample, pad = self.sample, partial(torch.nn.functional.pad, pad=(0, missing), value=-torch.inf)
            self.sample = lambda logits, *others: sample(pad(logits), *others)

    def build_inputs(self, batch: ScheduledBatch, before: ScheduledBatch | None = None) -> Any:
        """See the base class. Token ids beyond own_width, which have no text, become the last id below it."""
        inputs = super().build_inputs(batch, before)
        return inputs._replace(input_ids=inputs.input_ids.clip(max=self.own_width - 1))


class DraftModel:
    """Computes drafts for all sequences of a step at once."""

    def __init__(self, started: Started, asked: SpeculativeConfig) -> None:
        if started.num_state_slots:
            reason = "has recurrent states, from which a rejected draft token cannot be removed"
            raise ValueError(f"the draft model {asked.model} {reason}")
        self.started, self.runner, loaded = started, started.runner, started.loaded
        self.max_model_len = loaded.max_model_len  # longer sequences have no drafts
        self.max_drafts = asked.num_speculative_tokens
        self.block_bytes = block_bytes(loaded.kv_specs, loaded.kv_groups, loaded.block_size)
        self.shadows: WeakKeyDictionary[Sequence, Shadow] = WeakKeyDictionary()
        self.blocks: list[Block] = []  # the block manager's
        self.computed_blocks: dict[int, Prefix | None] = {}  # block_id -> the prefix of its K and V

    def follow(self, seq: Sequence, blocks: list[Block]) -> Shadow:
        """Return a sequence's shadow, up to date with its tokens and blocks."""
        self.blocks = blocks
        shadow = self.shadows.get(seq) or self.shadows.setdefault(seq, Shadow.of(seq))
        if shadow.drafts:
            shadow.compare(seq.token_ids)
        if shadow.view.block_table is not seq.block_table:  # it was admitted, perhaps after a preemption
            shadow.view.block_table, shadow.num_computed = seq.block_table, 0
        size = self.runner.block_size
        for block_id in seq.block_table[shadow.num_computed // size : seq.num_registered_blocks]:
            prefix = blocks[block_id].prefix
            if prefix is None or self.computed_blocks.get(block_id) is not prefix:
                break
            shadow.num_computed = (shadow.num_computed // size + 1) * size
        # Compute at least one token: its logits choose the first draft.
        shadow.num_computed = min(shadow.num_computed, len(seq.token_ids) - 1)
        return shadow

    def draft(self, sizes: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        """Return at most `sizes` drafts of each sequence, none if a pass cannot compute its known tokens."""
        drafts: dict[Sequence, list[int]] = {}
        size, shadows = self.runner.block_size, self.shadows
        budget, chunks = self.started.loaded.max_num_batched_tokens, list[Chunk]()
        for seq in sorted(sizes, key=lambda seq: len(seq.token_ids) - shadows[seq].num_computed):
            shadow = self.follow(seq, self.blocks)  # again: it may hit blocks that this pass computes
            num_known = len(seq.token_ids)
            start, end = shadow.num_computed, min(num_known, shadow.num_computed + budget)
            if start == end:
                break
            for block_id in seq.block_table[start // size :]:
                self.computed_blocks.pop(block_id, None)
            # Before they are computed: see `BlockManager.register_full_blocks`.
            first = min(start, shadow.num_known) // size
            for block_id in seq.block_table[first : min(end // size, seq.num_registered_blocks)]:
                self.computed_blocks[block_id] = self.blocks[block_id].prefix
            shadow.num_computed, shadow.num_known, shadow.drafts = end, num_known, []
            shadow.view.token_ids = list(seq.token_ids)
            self.runner.sampling_rows.counts.forget(shadow.view)  # the last drafts may be wrong
            budget -= end - start
            if end - start == 2:  # as two decodes: kernels are faster for decodes
                chunks.append(Chunk(shadow.view, start, start + 1, False, shadow.view.token_ids))
                start += 1
            chunks.append(Chunk(shadow.view, start, end, end == num_known, shadow.view.token_ids))
            if end == num_known:
                drafts[seq] = shadow.drafts
        while chunks:
            views = [chunk.seq for chunk in chunks if chunk.samples]
            batch = ScheduledBatch(chunks, views, sum(chunk.end - chunk.start for chunk in chunks))
            drawn = dict(zip(views, self.runner.collect(self.runner.launch(batch)).token_ids, strict=True))
            chunks = []
            for seq, so_far in drafts.items():
                view = shadows[seq].view
                token_id = drawn.get(view)
                if token_id is not None and token_id not in seq.stop_ids:  # else it has no more drafts
                    so_far.append(token_id)
                    view.token_ids.append(token_id)
                    if len(so_far) < sizes[seq]:
                        end = len(view.token_ids)
                        chunks.append(Chunk(view, end - 1, end, True, view.token_ids))
        return drafts


def draft_config(config: EngineConfig, asked: SpeculativeConfig) -> EngineConfig:
    """Return the settings of the draft model that `speculative_config` asks for."""
    if config.tensor_parallel_size > 1:
        raise ValueError(f"a draft model needs tensor_parallel_size=1, got {config.tensor_parallel_size}")
    names = "tokenizer", "gguf_file", "kv_cache_bytes", "lora", "kv_store", "trace", "hf_overrides"
    own: dict[str, Any] = dict.fromkeys(names)
    own |= {"model": asked.model, "revision": asked.revision, "quantization": asked.quantization}
    own |= {"dtype": asked.dtype or config.dtype, "generation_config": "vllm"}
    # One block until the target model's number is known, and two decodes per sequence: see `draft`.
    own |= {"num_kv_blocks": 1, "speculative_config": {"method": "ngram", "num_speculative_tokens": 1}}
    return replace(config, **own)


def check_vocabulary(draft: Checkpoint, target: Checkpoint) -> None:
    """Raise a ValueError that says where the models' vocabularies differ, unless they are the same."""
    ours, theirs = (one.tokenizer.get_vocab() if one.tokenizer else {} for one in (draft, target))
    if differing := ours.items() ^ theirs.items():
        token, _ = min(differing, key=lambda item: item[::-1])
        raise ValueError(
            f"the draft model {draft.path} and {target.path} must have the same vocabulary: the id of "
            f"{token!r} is {ours.get(token)} in the draft model, and {theirs.get(token)} in the target model"
        )


class ModelDraftingScheduler(DraftingScheduler):
    """Computes a step's drafts with the draft model, once its decodes are known."""

    def __init__(self, block_manager: Any, draft_model: DraftModel, **settings: Any) -> None:
        drafts: dict[Sequence, list[int]] = {}  # the drafts of the step that is being scheduled
        super().__init__(block_manager, propose=lambda seq, _: drafts.get(seq, []), **settings)
        self.draft_model, self.drafts = draft_model, drafts

    def prepare(self, chunks: list[Chunk], budget: int) -> None:
        """See the base class. The drafts are computed here."""
        model, sizes = self.draft_model, dict[Sequence, int]()
        self.drafts.clear()
        for chunk in chunks:
            seq = chunk.seq
            limit = min(self.limit_of(chunk, budget), model.max_drafts, model.max_model_len - chunk.end)
            grammars = [one.grammar for one in seq.processors if isinstance(one, Constraint)]
            if limit > 0 and all(one.takes_back and not one.is_slow for one in grammars):
                model.follow(seq, self.block_manager.blocks)
                if size := self.room_for(chunk, limit):
                    sizes[seq] = size
                    budget -= size
        self.drafts.update(model.draft(sizes))
