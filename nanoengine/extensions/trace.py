"""Records what an engine does, step by step, while it runs. viewer/trace_page.py shows the recording.

    LLM(..., trace="run.jsonl")    # JSON lines, or a callable that takes events

A trace is a start, then a step for each call of `LLMEngine.step` in which something changed. Replaying its
changes in order reproduces every queue, block table and reference count, and the free blocks in the order of
eviction. `version` increases when a field is removed or changes its meaning, not when one is added.

One call of `schedule` may free a block, evict it and give it to another sequence. The states before and after
a step would not show that, so the scheduler and the block manager tell the tracer about each change as soon
as it is made (`Scheduler.observe`). The tracer compares the sequence's block tables with its copy of them to
find the blocks that were taken or released.
"""

import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from nanoengine.engine import Prefix, ScheduledBatch, Scheduler, Sequence, tell_nobody

VERSION = 1

Event = dict[str, Any]  # docs/guide/trace.md explains its fields


class Tracer:
    """Follows a scheduler that was not used yet, and its block manager. Writes a step at each `end_step`.

    If the target or the tokenizer raises, the error is logged, the trace ends, and the engine continues. No
    argument may refer to the KV cache, because its memory must be freed when the engine closes. `request_of`
    returns a sequence's request_id, from its seq_id. `seconds` are the running totals of a `Stopwatch`.
    Raises OSError if the file cannot be written.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        target: str | Path | Callable[[Any], Any],
        *,
        model: str | Path = "",
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
        self._tables: dict[int, list[list[int]]] = {}  # block tables of running sequences, by seq_id
        self._touched: dict[int, None] = {}  # the seq_ids whose block tables changed, in order
        self._registered: set[int] = set()  # ids of registered blocks, in use or free
        self._prefix_ids: WeakKeyDictionary[Prefix, int] = WeakKeyDictionary()
        self._next_prefix_id = itertools.count(1)
        self._in_flight: list[tuple[ScheduledBatch, int]] = []  # batches, with the step that scheduled each
        self._tokens: Event | None = None  # the "tokens" change of the current call of `update`
        self._new_token_ids: set[int] = set()  # since the last step
        self._known_token_ids: set[int] = set()  # token ids whose texts are already written
        start = {
            "event": "start",
            "version": VERSION,
            "model": Path(model).resolve().name if str(model) and Path(model).exists() else str(model),
            "block_size": self.blocks.block_size,
            "num_blocks": self.blocks.num_blocks,
            "windows": list(getattr(self.blocks, "windows", (None,))),
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_chunk_tokens": scheduler.max_chunk_tokens,
            "enable_prefix_caching": self.blocks.enable_prefix_caching,
        }
        scheduler.observe(self._on_event)
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
                {"seq": seq_id, "tables": self._tables.get(seq_id, [])} for seq_id in self._touched
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
        self.scheduler.observe(tell_nobody)
        self._write = lambda event: None

    def _note(self, change: str, **fields: Any) -> None:
        """Add a change to the step."""
        self._changes.append({"change": change, **fields})

    def _note_blocks(self, change: str, seq: Sequence, **fields: Any) -> None:
        """Add a change of a sequence's block tables to the step, and copy the tables."""
        self._note(change, seq=seq.seq_id, **fields)
        self._tables[seq.seq_id] = [list(table) for table in self._tables_of(seq)]
        self._touched[seq.seq_id] = None

    def _tables_of(self, seq: Sequence) -> list[list[int]]:
        """Return a sequence's block tables, one per group, or [] if it is not running."""
        if hasattr(self.blocks, "tables_of"):
            return self.blocks.tables_of(seq)  # type: ignore[no-any-return]
        return [seq.block_table] if seq.block_table else []

    def _take(self, tables: list[list[int]]) -> list[int]:
        """Return which newly allocated blocks were registered before, and so were evicted."""
        evicted = [block_id for table in tables for block_id in table if block_id in self._registered]
        self._registered.difference_update(evicted)
        return evicted

    def _release(self, block_ids: Iterable[int]) -> dict[str, list[int]]:
        """Divide released blocks into those that are free now, and those that other sequences hold."""
        divided: dict[str, list[int]] = {"freed": [], "shared": []}
        for block_id in block_ids:
            divided["shared" if self.blocks.blocks[block_id].ref_count else "freed"].append(block_id)
        return divided

    # -- the events that the scheduler and the block manager tell, by name

    def _on_event(self, event: str, *details: Any) -> None:
        getattr(self, f"_on_{event}")(*details)

    def _on_added(self, seq: Sequence) -> None:
        self._note(
            "add",
            seq=seq.seq_id,
            request=self._request_of(seq.seq_id),
            priority=seq.priority,
            token_ids=list(seq.token_ids),
            max_num_tokens=seq.max_num_tokens,
        )
        self._new_token_ids.update(seq.token_ids)

    def _on_refused(self, seq: Sequence, num_needed: int) -> None:
        self._note("refuse", seq=seq.seq_id, num_needed=num_needed, num_free=self.blocks.num_free_blocks)

    def _on_admitted(self, seq: Sequence) -> None:
        num_hits = seq.num_hit_tokens // self.blocks.block_size
        tables = self._tables_of(seq)
        hits, taken = [table[:num_hits] for table in tables], [table[num_hits:] for table in tables]
        held = [block_id for table in hits for block_id in table if block_id]
        self._note_blocks(
            "admit",
            seq,
            hits=hits,
            revived=[block_id for block_id in held if self.blocks.blocks[block_id].ref_count == 1],
            taken=taken,
            evicted=self._take(taken),
            num_computed_tokens=seq.num_computed_tokens,
        )

    def _on_skipped(self, seq: Sequence) -> None:
        pairs = zip(self._tables[seq.seq_id], self._tables_of(seq), strict=True)
        gone = [
            one for old, new in pairs for one, left in reversed([*zip(old, new, strict=False)]) if one != left
        ]
        self._note_blocks("skip", seq, **self._release(gone))

    def _on_grew(self, seq: Sequence) -> None:
        lengths = map(len, self._tables[seq.seq_id])
        taken = [table[length:] for table, length in zip(self._tables_of(seq), lengths, strict=True)]
        if any(taken):
            self._note_blocks("append", seq, taken=taken, evicted=self._take(taken))

    def _on_registered(self, seq: Sequence, first: int) -> None:
        tables = [table[first : seq.num_registered_blocks] for table in self._tables_of(seq)]
        prefixes: list[Prefix] = []
        prefix = seq.prefix
        for _ in range(first, seq.num_registered_blocks):
            assert prefix is not None
            prefixes.insert(0, prefix)
            prefix = prefix.parent
        for prefix in prefixes:
            if prefix not in self._prefix_ids:
                self._prefix_ids[prefix] = next(self._next_prefix_id)
        if prefixes:
            prefix_ids = [self._prefix_ids[prefix] for prefix in prefixes]
            self._registered.update(block_id for table in tables for block_id in table)
            self._note("register", seq=seq.seq_id, first=first, blocks=tables, prefix_ids=prefix_ids)

    def _on_scheduled(self, batch: ScheduledBatch) -> None:
        if not batch.chunks:
            return
        if batch.sampled_seqs:
            self._in_flight.append((batch, self._step))
        drafts = [None if ids is seq.token_ids else ids[start] for seq, start, *_, ids in batch.chunks]
        chunks = [
            {"seq": seq.seq_id, "start": start, "end": end, "samples": samples, "draft": draft}
            for (seq, start, end, samples, _), draft in zip(batch.chunks, drafts, strict=True)
        ]
        self._new_token_ids.update(draft for draft in drafts if draft is not None)
        self._note("schedule", num_tokens=batch.num_tokens, chunks=chunks)

    def _on_sampled(self, seq: Sequence, token_id: int | None) -> None:
        """Add a token to the "tokens" change, which precedes the changes that it causes."""
        change, seq_id = self._tokens or self._begin_tokens(), seq.seq_id
        entry = next((one for one in change["tokens"] if one["seq"] == seq_id), None)
        if entry is not None:
            entry["num_accepted"] += 1  # a second token is only sampled after an accepted draft
        elif token_id is not None:
            entry = {"seq": seq_id, "token_ids": [], "num_accepted": 0}
            change["tokens"].append(entry)
            change["discarded"].remove(seq_id)
        if entry is not None and token_id is not None:
            entry["token_ids"].append(token_id)
            self._new_token_ids.add(token_id)

    def _begin_tokens(self) -> Event:
        """Note that the tokens of the oldest step in flight arrive."""
        batch, of_step = self._in_flight.pop(0)
        seq_ids = list(dict.fromkeys(seq.seq_id for seq in batch.sampled_seqs))
        self._note("tokens", of_step=of_step, tokens=[], discarded=seq_ids)
        self._tokens = self._changes[-1]
        return self._tokens

    def _on_updated(self, batch: ScheduledBatch) -> None:
        if self._tokens is None and batch.sampled_seqs:  # all of its sequences finished before
            self._begin_tokens()
        self._tokens = None

    def _on_freed(self, seq: Sequence, for_seq: Sequence | None) -> None:
        tables = self._tables.get(seq.seq_id, [])
        columns = [*itertools.zip_longest(*tables, fillvalue=0)]
        released = self._release(block_id for column in reversed(columns) for block_id in column if block_id)
        needed_by = None if for_seq is None else for_seq.seq_id
        self._note_blocks("free", seq, why=seq.finish_reason or "preempted", for_seq=needed_by, **released)
        del self._tables[seq.seq_id]

    def _on_failed(self) -> None:
        self._in_flight, self._tokens = [], None
        self._note("fail", error=repr(sys.exception()))

    def _on_cleared(self) -> None:
        self._touched |= dict.fromkeys(self._tables)
        self._tables, self._registered = {}, set()
        self._note("clear")


def _append_line(path: Path, event: Event) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(event, separators=(",", ":")) + "\n")


def _token_text(backend: Any, token_id: int) -> str:
    """Return a token's text, with the leading space that SentencePiece would strip."""
    text = str(backend.decode([token_id], skip_special_tokens=False))
    starts_word = str(backend.id_to_token(token_id)).startswith("▁")
    return " " + text if starts_word and not text.startswith(" ") else text
