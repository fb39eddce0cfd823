"""Records what an engine does, step by step, while it runs. contrib/viewer.py shows the recording.

    LLM(..., trace="run.jsonl")    # JSON lines, or a callable that takes events

A trace is a start, then a step for each call of `LLMEngine.step` in which something changed. Replaying
its changes in order reproduces every queue, block table and reference count, and both lists of free blocks in
the order of eviction. `version` increases when a field is removed or changes its meaning, not when one is
added.

One call of `schedule` may free a block, evict it and give it to another sequence. The states before and after
a step would not show that, so a few methods of the scheduler and the block manager are wrapped while tracing
is on.
"""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nanoengine.engine import Block, Chunk, ScheduledBatch, Scheduler, Sequence
from nanoengine.llm_engine import LLMEngine

VERSION = 1

# ---- the schema ----------------------------------------------------------------------------------
# `seq` is a seq_id, which increases in order of arrival. Blocks are identified by block_id. `hits`, `taken`,
# `blocks` and `tables` have one list per KV cache group, and most models have one group. In a block table, 0,
# the null block, stands for a block outside the group's window.
#
# {"event": "start", ...} has all that does not change:
#     version
#     model                   hub id, or the directory's name
#     block_size              in tokens
#     num_blocks              usable blocks, with ids 1 to num_blocks
#     windows                 each group's sliding window in tokens, newest included; None: no window
#     max_num_seqs
#     max_num_batched_tokens  the token budget of a step
#     max_chunk_tokens        limit on the tokens of one sequence per step
#     enable_prefix_caching
#
# {"event": "step", ...} has what happened since the end of the previous step:
#     step                    from 1
#     time_s                  when the step ended, in seconds since the trace began
#     seconds                 per phase: schedule, inputs, forward, sample, update
#     changes                 in order, each one of those below
#     block_tables            {seq, tables} of the sequences whose tables changed; []: it is not running
#     num_free_blocks, num_running, num_waiting
#     texts                   token id -> text, for ids that are new in the trace; empty without a tokenizer
#
# {"change": "add", ...}      A sequence was queued.
#     seq, priority
#     request                 request_id; its samples are several sequences
#     token_ids               the prompt
#     max_num_tokens          limit on prompt plus output
# {"change": "refuse", ...}   Too few blocks were free to admit the head of the waiting queue. All wait.
#     seq, num_free
#     num_needed              free blocks needed: new ones, and hits that are free
# {"change": "admit", ...}    A waiting sequence got blocks for its tokens, or those in the window, and runs.
#     seq
#     hits                    prefix cache hits, at the start of its block tables
#     revived                 the hits that were free
#     taken                   newly allocated blocks, the rest of its block tables
#     evicted                 the taken blocks whose registered content was lost
#     num_computed_tokens     tokens in the hits, or one less if the hits cover the whole sequence
# {"change": "skip", ...}     Blocks left a sliding window and are now 0 in the block tables of those groups.
#     seq
#     freed                   now free, in this order: group by group, the last block first
#     shared                  still held by other sequences
# {"change": "append", ...}   Block tables grew, to fit the sequence's next token or a draft after it.
#     seq, taken, evicted
# {"change": "register", ...} Blocks were registered, which the scheduled step or accepted drafts fill.
#     seq
#     first                   index of the first registered block in each block table
#     blocks                  0: the block is outside the window already
#     prefix_ids              one per index; equal for blocks with the same tokens after the same prefix
# {"change": "schedule", ...} The batch is complete. Its tokens, except drafts, now count as computed.
#     num_tokens
#     chunks                  {seq, start, end, samples, draft}. samples: a token is sampled after it. draft:
#                             the draft token's id, None for known tokens. Each draft has its own chunk, after
#                             the chunks of the sequence's last token and earlier drafts
# {"change": "tokens", ...}   The tokens sampled by a step arrived.
#     of_step                 may be an earlier step, with async scheduling
#     tokens                  {seq, token_ids, num_accepted}. Accepted drafts count as computed from here on
#     discarded               sequences that finished before, or whose token could not be sampled
# {"change": "free", ...}     A sequence's blocks were freed: it finished, or was preempted and waits again.
#     seq
#     why                     "preempted", or its finish_reason
#     for_seq                 if preempted, the sequence that needed a block, possibly this one
#     freed, shared           as above: the last block of the table first
# {"change": "fail", "error"} The step raised. Running sequences wait again and keep their tokens.
# {"change": "clear"}         All blocks became free and unregistered, after a failure or the user's reset.

Event = dict[str, Any]

# ---- recording -----------------------------------------------------------------------------------


class Tracer:
    """Follows a scheduler and its block manager, and writes a step at each `end_step`.

    If the target or the tokenizer raises, the error is logged, the trace ends, and the engine continues. No
    argument may refer to the KV cache, because its memory must be freed when the engine closes.

    Args:
        scheduler: must not have been used yet.
        target: a callable that takes events, or the path of a file of JSON lines, each written as soon as its
            step ends.
        model: the model's name.
        request_of: returns the request_id of a sequence, from its seq_id.
        tokenizer: a transformers tokenizer. None: there is none.
        seconds: the running total of each phase in seconds, as in `Stopwatch`.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        target: str | Path | Callable[[Any], Any],
        *,
        model: str = "",
        request_of: Callable[[int], str] = str,
        tokenizer: Any = None,
        seconds: dict[str, float] | None = None,
    ) -> None:
        if callable(target):
            self._write = target
        else:
            path = Path(target).resolve()
            path.write_text("")
            self._write = partial(_append_line, path)
        self.scheduler = scheduler
        self.blocks: Any = scheduler.block_manager  # a BlockManager, or one with windows
        self._request_of = request_of
        self._backend = None if tokenizer is None else tokenizer.backend_tokenizer
        self._seconds: dict[str, float] = {} if seconds is None else seconds
        self._seconds_before = dict(self._seconds)
        self._began = time.perf_counter()
        self._step = 1
        self._changes: list[Event] = []  # since the last step
        self._touched: dict[int, Sequence] = {}  # sequences whose block table changed, by seq_id
        self._in_flight: list[tuple[ScheduledBatch, int]] = []  # batches, with the step that scheduled each
        # Blocks that the current call of `allocate`, `may_append` or `free` evicted or released:
        self._evicted: list[int] = []
        self._freed: list[int] = []
        self._shared: list[int] = []  # released, but still held by other sequences
        self._num_needed = 0  # free blocks needed by the current call of `allocate`
        self._num_draws: Counter[int] = Counter()  # seq_id -> tokens appended by the current `update`
        self._short: int | None = None  # the last sequence that found too few free blocks
        self._new_token_ids: set[int] = set()  # since the last step
        self._known_token_ids: set[int] = set()  # token ids whose texts are already written
        names = "add", "schedule", "update", "append_token", "recover"
        self._wrapped: list[tuple[object, str]] = [(scheduler, name) for name in names]
        names = "allocate", "may_append", "register_full_blocks", "free", "clear"
        self._wrapped += [(self.blocks, name) for name in (*names, "_hold", "_take_free_block", "_release")]
        for owner, name in self._wrapped:
            setattr(owner, name, partial(getattr(self, f"_on_{name.strip('_')}"), getattr(owner, name)))
        start = {
            "event": "start",
            "version": VERSION,
            "model": model,
            "block_size": self.blocks.block_size,
            "num_blocks": self.blocks.num_blocks,
            "windows": list(getattr(self.blocks, "windows", (None,))),
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_chunk_tokens": scheduler.max_chunk_tokens,
            "enable_prefix_caching": self.blocks.enable_prefix_caching,
        }
        self._emit(lambda: start)

    def end_step(self) -> None:
        """Write the changes since the last call, if there are any."""
        if not self._changes:
            return
        self._emit(self._make_step)
        self._step += 1
        self._changes, self._touched, self._new_token_ids = [], {}, set()
        self._seconds_before = dict(self._seconds)

    def _make_step(self) -> Event:
        texts = {}
        if self._backend is not None:
            new = sorted(self._new_token_ids - self._known_token_ids)
            self._known_token_ids.update(new)
            texts = {str(token_id): _token_text(self._backend, token_id) for token_id in new}
        before = self._seconds_before
        return {
            "event": "step",
            "step": self._step,
            "time_s": round(time.perf_counter() - self._began, 7),
            "seconds": {phase: round(total - before[phase], 7) for phase, total in self._seconds.items()},
            "changes": self._changes,
            "block_tables": [
                {"seq": seq_id, "tables": [list(table) for table in self._tables_of(seq)]}
                for seq_id, seq in self._touched.items()
            ],
            "num_free_blocks": self.blocks.num_free_blocks,
            "num_running": len(self.scheduler.running),
            "num_waiting": len(self.scheduler.waiting),
            "texts": texts,
        }

    def close(self) -> None:
        """Write the remaining changes, and stop tracing."""
        self.end_step()
        self._detach()

    def _emit(self, make_event: Callable[[], Event]) -> None:
        try:
            self._write(make_event())
        except Exception:
            logging.getLogger(__name__).exception("the trace cannot be written and ends here")
            self._detach()

    def _detach(self) -> None:
        for owner, name in self._wrapped:
            delattr(owner, name)
        self._wrapped = []
        self._write = lambda event: None

    def _note(self, change: str, **fields: Any) -> None:
        """Add a change to the step."""
        self._changes.append({"change": change, **fields})

    def _note_blocks(self, change: str, seq: Sequence, **fields: Any) -> None:
        """Add a change of a sequence's block tables to the step."""
        self._note(change, seq=seq.seq_id, **fields)
        self._touched[seq.seq_id] = seq

    def _tables_of(self, seq: Sequence) -> list[list[int]]:
        """Return a sequence's block tables, one per group, or [] if it is not running."""
        if hasattr(self.blocks, "tables_of"):
            return self.blocks.tables_of(seq)  # type: ignore[no-any-return]
        return [seq.block_table] if seq.block_table else []

    # -- the wrappers: each takes the wrapped method as its first argument

    def _on_add(self, add: Callable[..., None], seq: Sequence) -> None:
        add(seq)
        self._note(
            "add",
            seq=seq.seq_id,
            request=self._request_of(seq.seq_id),
            priority=seq.priority,
            token_ids=list(seq.token_ids),
            max_num_tokens=seq.max_num_tokens,
        )
        self._new_token_ids.update(seq.token_ids)

    def _on_schedule(self, schedule: Callable[[], ScheduledBatch]) -> ScheduledBatch:
        batch = schedule()
        if batch.chunks:
            if batch.sampled_seqs:
                self._in_flight.append((batch, self._step))
            drafts = [draft_of(chunk) for chunk in batch.chunks]
            chunks = [
                {"seq": seq.seq_id, "start": start, "end": end, "samples": samples, "draft": draft}
                for (seq, start, end, samples, _), draft in zip(batch.chunks, drafts, strict=True)
            ]
            self._new_token_ids.update(draft for draft in drafts if draft is not None)
            self._note("schedule", num_tokens=batch.num_tokens, chunks=chunks)
        return batch

    def _on_update(
        self, update: Callable[..., list[Sequence]], batch: ScheduledBatch, *arguments: Any
    ) -> list[Sequence]:
        of_step = next((step for one, step in self._in_flight if one is batch), None)
        if of_step is None:  # no sequence of the batch samples
            return update(batch, *arguments)
        self._in_flight = [entry for entry in self._in_flight if entry[0] is not batch]
        before = {seq: len(seq.token_ids) for seq in batch.sampled_seqs}
        self._num_draws.clear()
        position = len(self._changes)
        try:
            return update(batch, *arguments)
        finally:
            new = {seq.seq_id: seq.token_ids[length:] for seq, length in before.items()}
            tokens = [
                {"seq": i, "token_ids": ids, "num_accepted": max(0, self._num_draws[i] - 1)}
                for i, ids in new.items()
                if ids
            ]
            discarded = [i for i, ids in new.items() if not ids]
            self._note("tokens", of_step=of_step, tokens=tokens, discarded=discarded)
            self._changes.insert(position, self._changes.pop())  # before the changes that it causes
            self._new_token_ids.update(*new.values())

    def _on_append_token(
        self, append_token: Callable[..., None], seq: Sequence, token_id: int | None
    ) -> None:
        self._num_draws[seq.seq_id] += 1
        append_token(seq, token_id)

    def _on_recover(self, recover: Callable[[], None]) -> None:
        self._in_flight.clear()
        self._touched |= {seq.seq_id: seq for seq in self.scheduler.running}
        self._note("fail", error=repr(sys.exception()))
        recover()

    def _on_allocate(self, allocate: Callable[[Sequence], bool], seq: Sequence) -> bool:
        self._evicted = []
        blocks = self.blocks
        if not allocate(seq):
            self._note("refuse", seq=seq.seq_id, num_needed=self._num_needed, num_free=blocks.num_free_blocks)
            return False
        num_hits = seq.num_hit_tokens // blocks.block_size
        tables = self._tables_of(seq)
        held = [block_id for table in tables for block_id in table[:num_hits] if block_id]
        self._note_blocks(
            "admit",
            seq,
            hits=[table[:num_hits] for table in tables],
            revived=[block_id for block_id in held if blocks.blocks[block_id].ref_count == 1],
            taken=[table[num_hits:] for table in tables],
            evicted=self._evicted,
            num_computed_tokens=seq.num_computed_tokens,
        )
        return True

    def _on_may_append(self, may_append: Callable[..., bool], seq: Sequence, num_tokens: int) -> bool:
        self._evicted, self._freed, self._shared = [], [], []
        tables = self._tables_of(seq)
        lengths = [len(table) for table in tables]
        has_room = may_append(seq, num_tokens)
        if self._freed or self._shared:
            self._note_blocks("skip", seq, freed=self._freed, shared=self._shared)
        taken = [table[length:] for table, length in zip(tables, lengths, strict=True)]
        if not has_room:
            self._short = seq.seq_id
        elif any(taken):
            self._note_blocks("append", seq, taken=taken, evicted=self._evicted)
        return has_room

    def _on_hold(self, hold: Callable[..., bool], hits: list[Block], num_new: int) -> bool:
        self._num_needed = num_new + sum(block.ref_count == 0 for block in hits)
        return hold(hits, num_new)

    def _on_take_free_block(self, take_free_block: Callable[[], int]) -> int:
        num_evictable = len(self.blocks.evictable_blocks)
        block_id = take_free_block()
        if len(self.blocks.evictable_blocks) < num_evictable:
            self._evicted.append(block_id)
        return block_id

    def _on_release(self, release: Callable[[int], None], block_id: int) -> None:
        release(block_id)
        is_shared = self.blocks.blocks[block_id].ref_count > 0
        (self._shared if is_shared else self._freed).append(block_id)

    def _on_register_full_blocks(
        self, register_full_blocks: Callable[..., None], seq: Sequence, num_tokens: int
    ) -> None:
        first = seq.num_registered_blocks
        register_full_blocks(seq, num_tokens)
        tables = [table[first : seq.num_registered_blocks] for table in self._tables_of(seq)]
        # All blocks at one index share a prefix_id, except the null block, which has 0.
        prefix_ids = [
            max(self.blocks.blocks[block_id].prefix_id for block_id in block_ids)
            for block_ids in zip(*tables, strict=True)
        ]
        if prefix_ids:
            self._note("register", seq=seq.seq_id, first=first, blocks=tables, prefix_ids=prefix_ids)

    def _on_free(self, free: Callable[[Sequence], None], seq: Sequence) -> None:
        self._freed, self._shared = [], []
        free(seq)
        why, for_seq = seq.finish_reason or "preempted", None if seq.finish_reason else self._short
        self._note_blocks("free", seq, why=why, for_seq=for_seq, freed=self._freed, shared=self._shared)

    def _on_clear(self, clear: Callable[[], None]) -> None:
        clear()
        self._note("clear")


def draft_of(chunk: Chunk) -> int | None:
    """Return a chunk's draft token, or None if it computes known tokens."""
    return None if chunk.token_ids is chunk.seq.token_ids else chunk.token_ids[chunk.start]


def _append_line(path: Path, event: Event) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(event, separators=(",", ":")) + "\n")


def _token_text(backend: Any, token_id: int) -> str:
    """Return a token's text, with the leading space that SentencePiece would strip."""
    text = str(backend.decode([token_id], skip_special_tokens=False))
    starts_word = str(backend.id_to_token(token_id)).startswith("▁")
    return " " + text if starts_word and not text.startswith(" ") else text


def trace_engine(engine: LLMEngine) -> Tracer:
    """Return the tracer that `EngineConfig.trace` asks for."""
    assert engine.config.trace is not None
    model, requests = Path(engine.config.model), engine._request_of
    target: Any = engine.config.trace
    return Tracer(
        engine.scheduler,
        target,
        model=model.resolve().name if model.exists() else str(model),
        request_of=lambda seq_id: str(requests[seq_id].request_id),
        tokenizer=engine.checkpoint.tokenizer,
        seconds=engine.runner.stopwatch.seconds,
    )
