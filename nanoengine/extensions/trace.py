"""What an engine did, step by step, recorded as it runs; apps/viewer.py shows it.

    LLM(..., trace="run.jsonl")    # JSON lines, or a callable that takes events

A trace is a `Start`, then a `Step` for each call of `LLMEngine.step` in which something changed. A step's
changes stand in the order in which they happened, so that whoever replays them has every queue, block table
and reference count, and both lists of free blocks in the order of eviction. `version` goes up when a field
changes its meaning or goes; fields may be added without.

How it sees them: to compare the state after two steps would not be enough. In one call of `schedule` a block
can be freed by a preemption, evicted and handed to another sequence, and be hit again in the next. So while
tracing is on, a few methods of the scheduler and the block manager are wrapped, on these two objects alone;
off, there is nothing.
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
# Sequences go by `seq`, their seq_id, the order of arrival; blocks by their block_id. A list of lists has one
# per KV cache group, and most models have one group. In a block table 0, the null block, stands for what is
# out of the group's window.


class Start(TypedDict):
    """The first event: what does not change."""

    event: Literal["start"]
    version: int
    model: str  # hub id, or the directory's name
    block_size: int  # tokens
    num_blocks: int  # usable ones: 1 to num_blocks
    windows: list[int | None]  # tokens that each group sees of a sequence, the newest too; None: all
    max_num_seqs: int
    max_num_batched_tokens: int  # the token budget of a step
    max_chunk_tokens: int  # most tokens of one sequence in a step
    enable_prefix_caching: bool


class Add(TypedDict):
    """A sequence was queued, since the step before."""

    change: Literal["add"]
    seq: int
    request: str  # request_id; its samples are several sequences
    priority: int
    token_ids: list[int]  # the prompt
    max_num_tokens: int  # prompt and output at most


class Refuse(TypedDict):
    """The head of the waiting queue was not admitted: too few blocks were free. Those behind it wait too."""

    change: Literal["refuse"]
    seq: int
    num_needed: int  # of the free blocks: new ones, and hits that are free
    num_free: int


class Admit(TypedDict):
    """A waiting sequence got blocks for all of its tokens, or as many as a window needs, and runs."""

    change: Literal["admit"]
    seq: int
    hits: list[list[int]]  # blocks of the prefix cache, the beginning of its block tables
    revived: list[int]  # those of the hits that were free
    taken: list[list[int]]  # free blocks, the rest of its block tables
    evicted: list[int]  # those of the taken ones whose registered content was lost
    num_computed_tokens: int  # of the hits; one less where they are the whole sequence


class Skip(TypedDict):
    """Blocks that no token to come sees left the tables of groups with a window; 0 stands in their places."""

    change: Literal["skip"]
    seq: int
    freed: list[int]  # blocks that are free now, in this order: group by group, the last first
    shared: list[int]  # blocks that others still hold


class Append(TypedDict):
    """A running sequence's block tables grew: its next token, or a draft behind it, did not fit."""

    change: Literal["append"]
    seq: int
    taken: list[list[int]]
    evicted: list[int]


class Register(TypedDict):
    """Blocks that the step being scheduled fills became findable, or those that accepted drafts fill."""

    change: Literal["register"]
    seq: int
    first: int  # index in the block tables of the first ones
    blocks: list[list[int]]  # 0 where one is out of sight already
    prefix_ids: list[int]  # one per index; equal for blocks with the same tokens after the same prefix


class Chunk(TypedDict):
    """Tokens [start, end) of a sequence, computed in this step.

    A draft has a chunk of its own, behind that of the sequence's last token and of the drafts before it.
    """

    seq: int
    start: int
    end: int
    samples: bool  # it reaches the sequence's end: a token is drawn
    draft: int | None  # the id of the token that was guessed to stand here; None: it is known


class Schedule(TypedDict):
    """The step's batch is complete; its tokens, but for drafts, count as computed from here on."""

    change: Literal["schedule"]
    num_tokens: int
    chunks: list[Chunk]


class NewTokens(TypedDict):
    """What a sequence took from a step."""

    seq: int
    token_ids: list[int]
    num_accepted: int  # of its drafts, the first ones, that came true: computed tokens from here on


class Tokens(TypedDict):
    """The tokens that a step drew arrived: this step's, or with async scheduling an earlier one's."""

    change: Literal["tokens"]
    of_step: int
    tokens: list[NewTokens]
    discarded: list[int]  # sequences that had ended by then, or whose token could not be drawn


class Free(TypedDict):
    """A sequence gave its blocks back: it ended, or was preempted and waits again with its tokens."""

    change: Literal["free"]
    seq: int
    why: str  # "preempted", or its finish_reason
    for_seq: int | None  # whoever needed a block, where preempted; may be the sequence itself
    freed: list[int]  # blocks that are free now, in this order: the last of the table first
    shared: list[int]  # blocks that others still hold


class Fail(TypedDict):
    """The step raised; what was running waits again, with the tokens it had. A `Clear` follows."""

    change: Literal["fail"]
    error: str


class Clear(TypedDict):
    """No block is held, and nothing can be found, any more: after a failure, or the user's reset."""

    change: Literal["clear"]


Change = Add | Refuse | Admit | Skip | Append | Register | Schedule | Tokens | Free | Fail | Clear


class Tables(TypedDict):
    """A sequence's block tables as they are at the end of a step; none where it runs no more."""

    seq: int
    tables: list[list[int]]


class Step(TypedDict):
    """What happened between the end of the step before and the end of this one."""

    event: Literal["step"]
    step: int  # from 1
    time_s: float  # when it ended, in seconds since the trace began
    seconds: dict[str, float]  # of each phase: schedule, inputs, forward, sample, update
    changes: list[Change]
    block_tables: list[Tables]  # those that the changes touched
    num_free_blocks: int
    num_running: int
    num_waiting: int
    texts: dict[str, str]  # token id -> its text, for ids that no step before had; empty without a tokenizer


Event = Start | Step

# ---- recording -----------------------------------------------------------------------------------


class Tracer:
    """Follows a scheduler and its block manager, and writes a `Step` at each `end_step`.

    Where `write` or `text_of` fails, the trace ends with a line in the log, and the step goes on.

    Args:
        scheduler: has to be unused so far.
        write: takes the events.
        model: for the `Start`.
        request_of: the request that a sequence belongs to, by seq_id.
        text_of: a token's text; None: there is no tokenizer.
        seconds: counts the phases' seconds up, as `Stopwatch` does.
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
        self.blocks: Any = scheduler.block_manager  # a plain one, or one that knows windows
        self._write, self._request_of, self._text_of = write, request_of, text_of
        self._seconds: dict[str, float] = {} if seconds is None else seconds
        self._seconds_before = dict(self._seconds)
        self._began = time.perf_counter()
        self._step = 1
        self._changes: list[Change] = []  # since the last step
        self._touched: dict[int, Sequence] = {}  # sequences whose block table changed, by seq_id
        self._in_flight: list[tuple[ScheduledBatch, int]] = []  # and the step it was scheduled in
        # By the call of `allocate`, `may_append` or `free` that runs:
        self._evicted: list[int] = []
        self._freed: list[int] = []
        self._shared: list[int] = []  # given back, and held by others
        self._num_needed = 0  # free blocks, for the call of `allocate` that runs
        self._num_draws: Counter[int] = Counter()  # that counted, by seq_id, of the running `update`
        self._short: int | None = None  # the sequence that a block could not be found for
        self._new_token_ids: dict[int, None] = {}  # since the last step, each once
        self._told: set[int] = set()  # token ids whose texts are written
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
        """Write what changed since the last call, if anything did."""
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
        """Write what is left, and follow no further."""
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

    # -- the wrappers: each takes the method in its place first

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
        if not of_step:  # nobody is due a token
            return update(batch, *arguments)
        self._in_flight = [entry for entry in self._in_flight if entry[0] is not batch]
        before = {seq: len(seq.token_ids) for seq in batch.sampled_seqs}
        self._num_draws.clear()
        position = len(self._changes)  # before the blocks that it frees, which the tokens are the reason of
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
        """Return a sequence's block tables, by group. Return none if it does not run."""
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
        # Of the blocks of one index all have the same; the null block has 0.
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
    """The token that a chunk guesses; None: it computes what its sequence has."""
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
    """Trace a scheduler to a file of JSON lines, each written as soon as its step ends, or to a callable.

    Nothing that it is given may lead to the cache: its memory is freed with the engine.

    Args:
        scheduler: as `Tracer` takes it.
        target: the file, or what takes the events.
        model: as `Tracer` takes it.
        request_of: likewise.
        tokenizer: transformers'; None: there is none.
        seconds: as `Tracer` takes them.

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
    """A token by itself; the space before it, which SentencePiece strips, is kept."""
    text = str(backend.decode([token_id], skip_special_tokens=False))
    starts_word = str(backend.id_to_token(token_id)).startswith("▁")
    return " " + text if starts_word and not text.startswith(" ") else text
