"""Records what an engine does, step by step, while it runs. apps/viewer.py shows the recording.

    LLM(..., trace="run.jsonl")    # JSON lines, or a callable that takes events

A trace is a `Start`, then a `Step` for each call of `LLMEngine.step` in which something changed. A step lists
its changes in the order in which they happened. Replaying them reproduces every queue, block table and
reference count, and both lists of free blocks in the order of eviction. `version` increases when a field is
removed or changes its meaning, not when one is added.

Comparing the states after two steps would not be enough. In one call of `schedule` a block can be freed by a
preemption, evicted and given to another sequence, and be hit again in the next call. While tracing is on, a
few methods of the scheduler and the block manager are therefore wrapped, on these two objects only. When
tracing is off, it has no cost.
"""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict

from nanoengine.engine import Block, ScheduledBatch, Scheduler, Sequence
from nanoengine.engine import Chunk as ScheduledChunk

VERSION = 1

# ---- the schema ----------------------------------------------------------------------------------
# `seq` is a sequence's seq_id, which increases in order of arrival. Blocks are identified by block_id. A list
# of lists has one inner list per KV cache group, and most models have one group. In a block table, the null
# block, 0, stands for a block outside the group's window.


class Start(TypedDict):
    """Begins the trace, with all that does not change."""

    event: Literal["start"]
    version: int
    model: str  # hub id, or the directory's name
    block_size: int  # tokens
    num_blocks: int  # usable blocks, with ids 1 to num_blocks
    windows: list[int | None]  # each group's sliding window in tokens, newest included; None: no window
    max_num_seqs: int
    max_num_batched_tokens: int  # the token budget of a step
    max_chunk_tokens: int  # limit on the tokens of one sequence per step
    enable_prefix_caching: bool


class Add(TypedDict):
    """Reports that a sequence was queued since the previous step."""

    change: Literal["add"]
    seq: int
    request: str  # request_id; its samples are several sequences
    priority: int
    token_ids: list[int]  # the prompt
    max_num_tokens: int  # limit on prompt plus output


class Refuse(TypedDict):
    """Reports that too few blocks were free to admit the head of the waiting queue. The others wait too."""

    change: Literal["refuse"]
    seq: int
    num_needed: int  # free blocks needed: new ones, and hits that are free
    num_free: int


class Admit(TypedDict):
    """Reports that a waiting sequence got blocks for its tokens, or for those in the window, and now runs."""

    change: Literal["admit"]
    seq: int
    hits: list[list[int]]  # prefix cache hits, at the start of its block tables
    revived: list[int]  # the hits that were free
    taken: list[list[int]]  # newly allocated blocks, the rest of its block tables
    evicted: list[int]  # the taken blocks whose registered content was lost
    num_computed_tokens: int  # tokens in the hits, or one less if the hits cover the whole sequence


class Skip(TypedDict):
    """Reports that blocks left a sliding window and are now 0 in the block tables of those groups."""

    change: Literal["skip"]
    seq: int
    freed: list[int]  # blocks that are free now, in this order: group by group, the last block first
    shared: list[int]  # blocks that other sequences still hold


class Append(TypedDict):
    """Reports that a running sequence's block tables grew, to fit its next token or a draft after it."""

    change: Literal["append"]
    seq: int
    taken: list[list[int]]
    evicted: list[int]


class Register(TypedDict):
    """Reports that blocks were registered, which the scheduled step or accepted draft tokens fill."""

    change: Literal["register"]
    seq: int
    first: int  # index of the first registered block in each block table
    blocks: list[list[int]]  # 0: the block is outside the window already
    prefix_ids: list[int]  # one per index; equal for blocks with the same tokens after the same prefix


class Chunk(TypedDict):
    """Names the tokens [start, end) of a sequence that this step computes.

    Each draft token has its own chunk. It follows the chunks of the sequence's last token and earlier drafts.
    """

    seq: int
    start: int
    end: int
    samples: bool  # whether the chunk reaches the sequence's end, so that a token is sampled
    draft: int | None  # the draft token's id; None: the chunk computes known tokens


class Schedule(TypedDict):
    """Reports that the step's batch is complete. Its tokens, except drafts, now count as computed."""

    change: Literal["schedule"]
    num_tokens: int
    chunks: list[Chunk]


class NewTokens(TypedDict):
    """Holds the tokens that a sequence received from a step."""

    seq: int
    token_ids: list[int]
    num_accepted: int  # number of accepted draft tokens, which count as computed from here on


class Tokens(TypedDict):
    """Reports that the tokens sampled by a step arrived. With async scheduling it may be an earlier step."""

    change: Literal["tokens"]
    of_step: int
    tokens: list[NewTokens]
    discarded: list[int]  # sequences that finished before, or whose token could not be sampled


class Free(TypedDict):
    """Reports that a sequence's blocks were freed, because it finished or was preempted and waits again."""

    change: Literal["free"]
    seq: int
    why: str  # "preempted", or its finish_reason
    for_seq: int | None  # if preempted, the sequence that needed a block, possibly this one
    freed: list[int]  # blocks that are free now, in this order: the last block of the table first
    shared: list[int]  # blocks that other sequences still hold


class Fail(TypedDict):
    """Reports that the step raised. Running sequences wait again and keep their tokens. A `Clear` follows."""

    change: Literal["fail"]
    error: str


class Clear(TypedDict):
    """Reports that all blocks became free and unregistered, after a failure or the user's reset."""

    change: Literal["clear"]


Change = Add | Refuse | Admit | Skip | Append | Register | Schedule | Tokens | Free | Fail | Clear


class Tables(TypedDict):
    """Holds a sequence's block tables at the end of a step. There are none if it is not running."""

    seq: int
    tables: list[list[int]]


class Step(TypedDict):
    """Holds what happened between the end of the previous step and the end of this one."""

    event: Literal["step"]
    step: int  # from 1
    time_s: float  # when the step ended, in seconds since the trace began
    seconds: dict[str, float]  # per phase: schedule, inputs, forward, sample, update
    changes: list[Change]
    block_tables: list[Tables]  # of the sequences whose block tables changed
    num_free_blocks: int
    num_running: int
    num_waiting: int
    texts: dict[str, str]  # token id -> text, for ids that are new in the trace; empty without a tokenizer


Event = Start | Step

# ---- recording -----------------------------------------------------------------------------------


class Tracer:
    """Follows a scheduler and its block manager, and writes a `Step` at each `end_step`.

    If `write` or `text_of` raises, the error is logged, the trace ends, and the engine continues.

    Args:
        scheduler: must not have been used yet.
        write: is called with each event.
        model: the model's name, for the `Start`.
        request_of: returns the request_id of a sequence, from its seq_id.
        text_of: returns a token's text. None: there is no tokenizer.
        seconds: the running total of each phase in seconds, as in `Stopwatch`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        write: Callable[[Event], Any],
        *,
        model: str = "",
        request_of: Callable[[int], str] = str,
        text_of: Callable[[int], str] | None = None,
        seconds: dict[str, float] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.blocks: Any = scheduler.block_manager  # a BlockManager, or one with windows
        self._write, self._request_of, self._text_of = write, request_of, text_of
        self._seconds: dict[str, float] = {} if seconds is None else seconds
        self._seconds_before = dict(self._seconds)
        self._began = time.perf_counter()
        self._step = 1
        self._changes: list[Change] = []  # since the last step
        self._touched: dict[int, Sequence] = {}  # sequences whose block table changed, by seq_id
        self._in_flight: list[tuple[ScheduledBatch, int]] = []  # batches, with the step that scheduled each
        # Blocks that the current call of `allocate`, `may_append` or `free` evicted or released:
        self._evicted: list[int] = []
        self._freed: list[int] = []
        self._shared: list[int] = []  # released, but still held by other sequences
        self._num_needed = 0  # free blocks needed by the current call of `allocate`
        self._num_draws: Counter[int] = Counter()  # seq_id -> tokens appended by the current `update`
        self._short: int | None = None  # the last sequence that found too few free blocks
        self._new_token_ids: dict[int, None] = {}  # since the last step, each once
        self._told: set[int] = set()  # token ids whose texts are already written
        self._wrapped: list[tuple[object, str, Callable[..., Any]]] = [
            (scheduler, "add", self._add),
            (scheduler, "schedule", self._schedule),
            (scheduler, "update", self._update),
            (scheduler, "append_token", self._take),
            (scheduler, "recover", self._recover),
            (self.blocks, "allocate", self._allocate),
            (self.blocks, "may_append", self._may_append),
            (self.blocks, "register_full_blocks", self._register_full_blocks),
            (self.blocks, "free", self._free),
            (self.blocks, "clear", self._clear),
            (self.blocks, "_hold", self._hold),
            (self.blocks, "_take_free_block", self._take_free_block),
            (self.blocks, "_release", self._release),
        ]
        for owner, name, wrapper in self._wrapped:
            setattr(owner, name, partial(wrapper, getattr(owner, name)))
        self._emit(
            lambda: {
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
        )

    def end_step(self) -> None:
        """Write the changes since the last call, if there are any."""
        if not self._changes:
            return
        self._emit(self._take_step)
        self._step += 1
        self._changes, self._touched, self._new_token_ids = [], {}, {}
        self._seconds_before = dict(self._seconds)

    def _take_step(self) -> Step:
        new = sorted(self._new_token_ids.keys() - self._told)
        self._told.update(new)
        return {
            "event": "step",
            "step": self._step,
            "time_s": round(time.perf_counter() - self._began, 7),
            "seconds": {
                phase: round(total - self._seconds_before[phase], 7) for phase, total in self._seconds.items()
            },
            "changes": self._changes,
            "block_tables": [
                {"seq": seq.seq_id, "tables": [list(table) for table in self._tables_of(seq)]}
                for seq in self._touched.values()
            ],
            "num_free_blocks": self.blocks.num_free_blocks,
            "num_running": len(self.scheduler.running),
            "num_waiting": len(self.scheduler.waiting),
            "texts": {str(token_id): self._text_of(token_id) for token_id in new} if self._text_of else {},
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
        for owner, name, _ in self._wrapped:
            delattr(owner, name)
        self._wrapped = []
        self._write = lambda event: None

    # -- the wrappers: each takes the wrapped method as its first argument

    def _add(self, add: Callable[..., None], seq: Sequence) -> None:
        add(seq)
        self._changes.append(
            {
                "change": "add",
                "seq": seq.seq_id,
                "request": self._request_of(seq.seq_id),
                "priority": seq.priority,
                "token_ids": list(seq.token_ids),
                "max_num_tokens": seq.max_num_tokens,
            }
        )
        self._new_token_ids |= dict.fromkeys(seq.token_ids)

    def _schedule(self, schedule: Callable[[], ScheduledBatch]) -> ScheduledBatch:
        batch = schedule()
        if batch.chunks:
            if batch.sampled_seqs:
                self._in_flight.append((batch, self._step))
            chunks: list[Chunk] = [
                {
                    "seq": chunk.seq.seq_id,
                    "start": chunk.start,
                    "end": chunk.end,
                    "samples": chunk.samples,
                    "draft": draft_of(chunk),
                }
                for chunk in batch.chunks
            ]
            drafts = [chunk["draft"] for chunk in chunks if chunk["draft"] is not None]
            self._new_token_ids |= dict.fromkeys(drafts)
            self._changes.append({"change": "schedule", "num_tokens": batch.num_tokens, "chunks": chunks})
        return batch

    def _update(
        self, update: Callable[..., list[Sequence]], batch: ScheduledBatch, *arguments: Any
    ) -> list[Sequence]:
        of_step = [step for one, step in self._in_flight if one is batch]
        if not of_step:  # no sequence of the batch samples
            return update(batch, *arguments)
        self._in_flight = [entry for entry in self._in_flight if entry[0] is not batch]
        before = {seq: len(seq.token_ids) for seq in batch.sampled_seqs}
        self._num_draws.clear()
        position = len(self._changes)  # `Tokens` must precede the `Free`s that it causes
        try:
            return update(batch, *arguments)
        finally:
            grown = [seq for seq, length in before.items() if len(seq.token_ids) > length]
            tokens: Tokens = {
                "change": "tokens",
                "of_step": of_step[0],
                "tokens": [
                    {
                        "seq": seq.seq_id,
                        "token_ids": seq.token_ids[before[seq] :],
                        "num_accepted": max(0, self._num_draws[seq.seq_id] - 1),
                    }
                    for seq in grown
                ],
                "discarded": [seq.seq_id for seq in before if seq not in grown],
            }
            self._changes.insert(position, tokens)
            for seq in grown:
                self._new_token_ids |= dict.fromkeys(seq.token_ids[before[seq] :])

    def _take(self, take: Callable[..., None], seq: Sequence, token_id: int | None) -> None:
        self._num_draws[seq.seq_id] += 1
        take(seq, token_id)

    def _recover(self, recover: Callable[[], None]) -> None:
        self._in_flight.clear()
        self._touched |= {seq.seq_id: seq for seq in self.scheduler.running}
        self._changes.append({"change": "fail", "error": repr(sys.exception())})
        recover()

    def _allocate(self, allocate: Callable[[Sequence], bool], seq: Sequence) -> bool:
        self._evicted = []
        admitted = allocate(seq)
        blocks = self.blocks
        if not admitted:
            self._changes.append(
                {
                    "change": "refuse",
                    "seq": seq.seq_id,
                    "num_needed": self._num_needed,
                    "num_free": blocks.num_free_blocks,
                }
            )
            return False
        num_hits = seq.num_hit_tokens // blocks.block_size
        tables = self._tables_of(seq)
        hit_ids = [table[:num_hits] for table in tables]
        held = [block_id for group in hit_ids for block_id in group if block_id]
        self._changes.append(
            {
                "change": "admit",
                "seq": seq.seq_id,
                "hits": hit_ids,
                "revived": [block_id for block_id in held if blocks.blocks[block_id].ref_count == 1],
                "taken": [table[num_hits:] for table in tables],
                "evicted": self._evicted,
                "num_computed_tokens": seq.num_computed_tokens,
            }
        )
        self._touched[seq.seq_id] = seq
        return True

    def _may_append(self, may_append: Callable[..., bool], seq: Sequence, num_tokens: int) -> bool:
        self._evicted, self._freed, self._shared = [], [], []
        tables = self._tables_of(seq)
        lengths = [len(table) for table in tables]
        has_room = may_append(seq, num_tokens)
        if self._freed or self._shared:
            self._changes.append(
                {"change": "skip", "seq": seq.seq_id, "freed": self._freed, "shared": self._shared}
            )
            self._touched[seq.seq_id] = seq
        taken = [table[length:] for table, length in zip(tables, lengths, strict=True)]
        if not has_room:
            self._short = seq.seq_id
        elif any(taken):
            self._changes.append(
                {"change": "append", "seq": seq.seq_id, "taken": taken, "evicted": self._evicted}
            )
            self._touched[seq.seq_id] = seq
        return has_room

    def _tables_of(self, seq: Sequence) -> list[list[int]]:
        """Return a sequence's block tables, one per group, or [] if it is not running."""
        if hasattr(self.blocks, "tables_of"):
            return self.blocks.tables_of(seq)  # type: ignore[no-any-return]
        return [seq.block_table] if seq.block_table else []

    def _hold(self, hold: Callable[..., bool], hits: list[Block], num_new: int) -> bool:
        self._num_needed = num_new + sum(block.ref_count == 0 for block in hits)
        return hold(hits, num_new)

    def _take_free_block(self, take_free_block: Callable[..., int], *arguments: Any) -> int:
        num_evictable = len(self.blocks.evictable_blocks)
        block_id = take_free_block(*arguments)
        if len(self.blocks.evictable_blocks) < num_evictable:
            self._evicted.append(block_id)
        return block_id

    def _release(self, release: Callable[[int], None], block_id: int) -> None:
        release(block_id)
        is_shared = self.blocks.blocks[block_id].ref_count > 0
        (self._shared if is_shared else self._freed).append(block_id)

    def _register_full_blocks(
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
            self._changes.append(
                {
                    "change": "register",
                    "seq": seq.seq_id,
                    "first": first,
                    "blocks": tables,
                    "prefix_ids": prefix_ids,
                }
            )

    def _free(self, free: Callable[[Sequence], None], seq: Sequence) -> None:
        self._freed, self._shared = [], []
        free(seq)
        self._changes.append(
            {
                "change": "free",
                "seq": seq.seq_id,
                "why": seq.finish_reason or "preempted",
                "for_seq": None if seq.finish_reason else self._short,
                "freed": self._freed,
                "shared": self._shared,
            }
        )
        self._touched[seq.seq_id] = seq

    def _clear(self, clear: Callable[[], None]) -> None:
        clear()
        self._changes.append({"change": "clear"})


def draft_of(chunk: ScheduledChunk) -> int | None:
    """Return a chunk's draft token, or None if it computes known tokens."""
    return None if chunk.token_ids is chunk.seq.token_ids else chunk.token_ids[chunk.start]


def trace(
    scheduler: Scheduler,
    target: str | Path | Callable[[Any], Any],
    *,
    model: str,
    request_of: Callable[[int], str],
    tokenizer: Any,
    seconds: dict[str, float],
) -> Tracer:
    """Trace a scheduler to a callable, or to a file of JSON lines, each written as soon as its step ends.

    No argument may refer to the KV cache, because its memory must be freed when the engine closes.

    Args:
        scheduler: passed to `Tracer`.
        target: the file's path, or a callable that takes events.
        model: passed to `Tracer`.
        request_of: passed to `Tracer`.
        tokenizer: a transformers tokenizer. None: there is none.
        seconds: passed to `Tracer`.

    Raises:
        OSError: the file cannot be written.
    """
    if callable(target):
        write = target
    else:
        path = Path(target).resolve()
        path.write_text("")
        write = partial(_append_line, path)
    text_of = None if tokenizer is None else partial(_token_text, tokenizer.backend_tokenizer)
    return Tracer(scheduler, write, model=model, request_of=request_of, text_of=text_of, seconds=seconds)


def _append_line(path: Path, event: Event) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(event, separators=(",", ":")) + "\n")


def _token_text(backend: Any, token_id: int) -> str:
    """Return a token's text, with the leading space that SentencePiece would strip."""
    text = str(backend.decode([token_id], skip_special_tokens=False))
    starts_word = str(backend.id_to_token(token_id)).startswith("▁")
    return " " + text if starts_word and not text.startswith(" ") else text
