"""Explores every reachable state of small worlds: a few blocks, sequences and tokens, and any operation.

A world is a real scheduler and a real block manager under a real `EngineCore`. The world plays the runner: a
ledger records, for every slot of the cache, the tokens whose K and V a model would have written there. The
search is breadth first over canonical states, in which blocks, tokens and ids are renamed in the order of
their appearance. After each operation, all laws hold; otherwise the shortest script to the violation is
printed. Arrivals are unlimited: whenever a sequence finishes, another one may be added.

    python -m tests.worlds                 # all worlds: hours
    python -m tests.worlds windows states  # only those whose names contain one of the words
"""

import itertools
import marshal
import pickle
import sys
import time
from collections import deque
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from nanoengine.backends.device import Attention
from nanoengine.backends.step_inputs import BIN_SLOT, ZERO_SLOT
from nanoengine.engine import BlockManager, EngineCore, Launch, ModelRunner, Sampled, Scheduler, Sequence
from nanoengine.extensions.recurrent_states import StatefulBlockManager, StatefulRunner, StatefulScheduler
from nanoengine.extensions.sliding_windows import WindowedBlockManager, WindowedRunner
from nanoengine.extensions.speculative_decoding import DraftingScheduler, is_draft
from nanoengine.sampling.logprobs import Reports
from nanoengine.sampling_params import SamplingParams
from nanoengine.timing import Stopwatch
from tests.helpers import is_busy
from tests.laws import chain, check_laws, tables_of

EOS, UNDRAWN, POISON = 3, None, 9  # POISON: samples that must be discarded
STATE = -1  # in the ledger, a slot (STATE, n) is the n-th state slot
key_of = cache(chain)
NO_LIMIT = SamplingParams(max_tokens=None)


class Size(NamedTuple):
    """Describes a world."""

    num_blocks: int = 3
    block_size: int = 2
    max_len: int = 5  # prompt and output, if the blocks have room for it
    num_seqs: int = 2  # unfinished at a time
    budget: int = 3
    max_num_seqs: int = 3
    threshold: int = 0
    caching: bool = True
    prompts: tuple[tuple[int, ...], ...] = ((0,), (0, 1, 0))
    priorities: tuple[int, ...] = (0,)
    max_in_flight: int = 0
    windows: tuple[int | None, ...] | None = None  # None: without the extension
    num_drafts: int = 0
    num_state_slots: int = 0
    draws: tuple[int | None, ...] = (0, 1, EOS)
    hash_function: Any = xxh3_64_intdigest


class Choices:
    """Makes the choices of a given list, and the first option after its end. Records the alternatives."""

    def __init__(self, picks: tuple[int, ...] = ()) -> None:
        self.picks, self.counts = list(picks), list[int]()
        self.made: list[Any] = []

    def __call__(self, options: Any) -> Any:
        self.picks += [0] * (len(self.counts) + 1 - len(self.picks))
        self.made.append(options[self.picks[len(self.counts)]])
        self.counts.append(len(options))
        return self.made[-1]

    def following(self) -> tuple[int, ...] | None:
        """Return the next list of choices, in the order of a counter; None after the last."""
        for i in reversed(range(len(self.counts))):
            if self.picks[i] + 1 < self.counts[i]:
                return (*self.picks[:i], self.picks[i] + 1)
        return None


class World:
    """Holds a scheduler, and checks it. Operations are methods; `choose` decides what the model samples."""

    def __init__(self, size: Size) -> None:
        self.size, self.block_size = size, size.block_size
        self.stopwatch, self.choose = Stopwatch(), Choices()
        parts: list[Any] = [None, None, Attention(None, None, []), None, size.block_size]  # type: ignore[arg-type]
        runner: type = StatefulRunner if size.num_state_slots else WindowedRunner
        settings: dict[str, Any] = {"max_num_seqs": size.max_num_seqs, "max_model_len": size.max_len}
        settings["long_prefill_token_threshold"] = size.threshold
        make_blocks: Any = BlockManager
        make_scheduler: Any = Scheduler
        self.runner: Any = ModelRunner(*parts)
        self.windows = size.windows or (None,)
        groups: dict[str, Any] = {"hash_function": size.hash_function, "enable_prefix_caching": size.caching}
        if size.windows or size.num_state_slots:
            self.runner = runner(len(self.windows), *parts)
            groups |= {"windows": self.windows, "max_chunk_tokens": size.budget}
            groups["more_tables"], make_blocks = self.runner.more_tables, WindowedBlockManager
        if size.num_state_slots:
            make_blocks, make_scheduler = StatefulBlockManager, StatefulScheduler
            groups["num_state_slots"], settings["spans"] = size.num_state_slots, self.runner.spans
        if size.num_drafts:
            make_scheduler, settings["propose"] = DraftingScheduler, self.propose
        self.blocks = self.make_blocks(make_blocks, size.num_blocks, size.block_size, **groups)
        # Weak references and a lambda: neither can be copied.
        del self.runner.sampling_rows, self.runner.before_forward
        self.windows = getattr(self.blocks, "windows", (None,))
        make_scheduler = self.schedulers.get(make_scheduler, make_scheduler)
        self.scheduler = make_scheduler(self.blocks, max_num_batched_tokens=size.budget, **settings)
        self.calls_left = 0
        self.scheduler.observe(self.call)
        self.core = self.make_core(self.scheduler, self, size.max_in_flight)
        self.num_added, self.num_launched, self.failures = 0, 0, dict[int, int]()
        self.forget_cache()

    make_core: Any = EngineCore
    schedulers: ClassVar[dict[type, type]] = {}  # subclasses to use in place of schedulers

    def make_blocks(self, kind: Any, *sizes: int, **settings: Any) -> Any:
        return kind(*sizes, **settings)

    def forget_cache(self) -> None:
        # slot -> the group that wrote it, and the tokens up to and including its own
        self.cache: dict[Any, tuple[int, tuple[int, ...]]] = {(STATE, ZERO_SLOT): (STATE, ())}
        self.unknown: list[tuple[Any, Sequence, int]] = []  # slots written from a token that is pending

    @property
    def seqs(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    @property
    def is_idle(self) -> bool:
        return not (is_busy(self.scheduler) or self.core.in_flight)

    # -- operations

    def add(self, prompt: tuple[int, ...], priority: int, params: SamplingParams = NO_LIMIT) -> Sequence:
        self.num_added += 1
        ends: dict[str, Any] = {"priority": priority, "stop_ids": frozenset({EOS})}
        seq = Sequence(self.num_added, [*prompt], params, **ends)
        self.scheduler.add(seq)
        return seq

    def abort(self, number: int) -> None:
        self.scheduler.finish(self.seqs[number], "abort")

    def reset(self) -> None:
        unused = self.blocks.num_free_blocks == self.blocks.num_blocks
        assert self.blocks.reset_prefix_cache() == unused
        assert not unused or not self.blocks.prefixes

    def step(self) -> None:
        must_launch, self.num_launched = not self.core.in_flight, 0
        self.readers: dict[tuple[int, int], list[Sequence]] = {}  # (slot, position) -> its sequences
        for seq in self.scheduler.running:
            for table, i in itertools.product(tables_of(self.blocks, seq), range(seq.num_computed_tokens)):
                slot = table[i // self.block_size] * self.block_size + i % self.block_size
                self.readers.setdefault((slot, i), []).append(seq)
        collected = self.core.step()
        if collected is not None:
            self.check_collected(collected.advanced)
        assert self.num_launched or not must_launch, "work is left but nothing was scheduled"
        assert len(self.core.in_flight) <= (self.core.max_in_flight if self.num_launched else 0)

    def collect_surplus(self) -> None:
        """Collect what is in flight beyond a limit that was lowered."""
        while len(self.core.in_flight) > self.core.max_in_flight:
            self.check_collected(self.core.collect().advanced)

    def fail(self, call: int) -> bool:
        """Raise in one of the calls that a step makes to other code, and recover.

        Signals are delayed until a step ends, so nothing else raises. Returns False if there are fewer calls.
        """
        self.calls_left = call
        try:
            self.step()
            return False
        except TimeoutError:
            self.recover()
            return True
        finally:
            self.calls_left = 0

    def call(self, *details: object) -> None:
        """Count a call to other code, which `fail` may have chosen to raise. The observer is one of them."""
        self.calls_left -= 1
        if self.calls_left == 0:
            raise TimeoutError

    def recover(self) -> None:
        """Recover from a failed step."""
        self.calls_left = 0
        admitting = self.scheduler.admitting
        failed = [admitting] if admitting else self.scheduler.running or self.scheduler.waiting
        again = [seq for seq in failed if self.failures.get(seq.seq_id) == len(seq.token_ids)]
        self.failures |= {seq.seq_id: len(seq.token_ids) for seq in failed}
        assert not any(self.is_complete(seq) for seq in self.seqs), "a sequence goes on after its end"
        assert len({*self.seqs}) == len(self.seqs), "a sequence is in two queues"
        others = {*self.seqs} - {*again}
        self.core.recover()
        self.forget_cache()  # the model may have written anything
        assert all(seq.is_finished for seq in again), "a sequence fails forever"
        assert {*self.scheduler.waiting} == others, "a sequence is lost"
        assert self.blocks.num_free_blocks == self.blocks.num_blocks
        assert not self.core.in_flight

    # -- the runner

    def propose(self, seq: Sequence, num_tokens: int) -> list[int]:
        self.call()
        assert num_tokens > 0
        assert seq.num_computed_tokens == len(seq.token_ids)
        lengths = range(self.size.num_drafts + 1)  # perhaps more than there is room for
        drafts = [one for length in lengths for one in itertools.product((0, 1, EOS), repeat=length)]
        return [*self.choose(drafts)]

    def launch(self, batch: Any, before: Launch | None = None) -> Launch:
        assert not any(chunk.seq.is_finished for chunk in batch.chunks)
        assert 0 < batch.num_tokens == sum(end - start for _, start, end, _, _ in batch.chunks)
        assert batch.num_tokens <= self.size.budget
        assert batch.sampled_seqs == [chunk.seq for chunk in batch.chunks if chunk.samples]
        assert all(chunk.end < chunk.seq.max_num_tokens for chunk in batch.chunks), "computed for nothing"
        self.num_launched += 1
        self.write(batch, self.runner.build_inputs(batch, before.batch if before else None), before)
        self.check_cache()
        return Launch(batch, None, None, Reports([], []))

    def write(self, batch: Any, inputs: Any, before: Any) -> None:
        """Write a step's K and V and states to the ledger. Check what its attention reads."""
        self.call()
        owners = [chunk for chunk in batch.chunks for _ in range(chunk.start, chunk.end)]
        pending = [owners[row].seq for row in inputs.pending_rows]
        assert pending == [before.batch.sampled_seqs[i] for i in inputs.pending_samples] if pending else True
        rows = [*zip(owners, inputs.input_ids.tolist(), inputs.positions.tolist(), strict=True)]
        written = set()
        for group, slots in enumerate(np.atleast_2d(inputs.metadata.slot_mapping).tolist()):
            for (chunk, token_id, position), slot in zip(rows, slots, strict=True):
                known = tuple(chunk.token_ids)
                assert position == len(known) or token_id == known[position], "not the token of that position"
                if slot < self.block_size:  # the null block
                    assert position < chunk.seq.num_hit_tokens, "the K and V of a token are lost"
                    continue
                assert slot not in written, "two tokens of a step write the same slot"
                written.add(slot)
                readers = [seq for seq in self.readers.get((slot, position), ()) if seq is not chunk.seq]
                tables = [table for seq in readers for table in tables_of(self.blocks, seq)]
                assert not any(slot // self.block_size in one for one in tables), "another sequence reads it"
                self.put(slot, group, chunk, position + 1)
        shape = len(self.windows), len(batch.chunks), -1
        for group, tables in enumerate(inputs.metadata.block_tables.reshape(shape).tolist()):
            for (_, start, end, _, token_ids), table in zip(batch.chunks, tables, strict=True):
                self.check_read(group, table, start, end, token_ids)
        if inputs.states is not None:
            self.write_states(rows, inputs.states)

    def put(self, slot: Any, group: int, chunk: Any, end: int) -> None:
        self.cache[slot] = group, contents(chunk.seq, chunk.token_ids, end)
        if end > len(chunk.token_ids):
            self.unknown.append((slot, chunk.seq, end - 1))

    def write_states(self, rows: list, layout: Any) -> None:
        arrays = (layout.decode_rows, layout.decode_sources, layout.decode_targets)
        rows_and_slots = zip(*(x.tolist() for x in arrays), strict=True)
        parts = [(row, row + 1, *slots, False) for row, *slots in rows_and_slots]
        sources = {first: self.cache[STATE, source] for first, _, source, _, _ in parts}  # read before writes
        parts += layout.parts
        assert sorted(i for first, end, *_ in parts for i in range(first, end)) == [*range(len(rows))]
        for first, end, source, target, is_prompt in parts:
            chunk, _, start = rows[first]
            assert is_prompt == (start < chunk.seq.num_prompt_tokens)
            is_decode = not is_prompt and chunk.end - chunk.start == 1
            assert (first in sources) == is_decode, "a decode is no part"
            held = sources.get(first, self.cache[STATE, source])
            assert held == (STATE, tuple(chunk.token_ids[:start])), "a state of other tokens"
            assert target not in (ZERO_SLOT, BIN_SLOT)
            self.put((STATE, target), STATE, chunk, start + end - first)

    def collect(self, launch: Launch) -> Sampled:
        self.call()
        self.expected: dict[Sequence, tuple[list[int], str | None]] = {}
        return Sampled([self.draw(chunk) for chunk in launch.batch.chunks if chunk.samples], {})  # type: ignore

    def draw(self, chunk: Any) -> int | None:
        """Choose the sample after a chunk, and record what must become of it."""
        seq = chunk.seq
        known, reason = self.expected.get(seq, (seq.token_ids, None))
        if seq.is_finished or reason is not None:
            return POISON
        if is_draft(chunk) and (len(known) != chunk.end or known[-1] != chunk.token_ids[chunk.start]):
            return POISON
        assert is_draft(chunk) or chunk.end == len(known), "a token is sampled for another position"
        token_id = self.choose(self.size.draws)
        known = [*known, *([] if token_id is None else [token_id])]
        reasons = {UNDRAWN: "error", EOS: "stop"}
        ends = reasons.get(token_id, "length" if len(known) == seq.max_num_tokens else None)
        self.expected[seq] = known, ends
        return token_id  # type: ignore[no-any-return]

    # -- laws

    def check_collected(self, advanced: list[Sequence]) -> None:
        assert advanced == [*self.expected], "not the sequences that were sampled"
        for seq, expected in self.expected.items():
            assert (seq.token_ids, seq.finish_reason) == expected
            assert not (seq.block_table and seq.is_finished)
        for slot, seq, position in self.unknown:  # what was pending then is known now
            group, tokens = self.cache[slot]
            if tokens[-1] == pending(seq) and position < len(seq.token_ids):
                self.cache[slot] = group, tuple(seq.token_ids[: position + 1])
        self.unknown = [entry for entry in self.unknown if entry[2] >= len(entry[1].token_ids)]
        check_laws(self.scheduler)

    def check_read(self, group: int, table: list, start: int, end: int, token_ids: list) -> None:
        """Check that the ledger holds what the token at `start` and those after it see."""
        known, window = tuple(token_ids), self.windows[group]
        first = 0 if window is None else max(0, start - window + 1)
        for position in range(first, min(end, len(known))):
            slot = table[position // self.block_size] * self.block_size + position % self.block_size
            assert self.cache[slot] == (group, known[: position + 1]), "wrong K and V"

    def check_cache(self) -> None:
        """Check that the ledger holds what any future token may read, of sequences and by hits."""
        for seq in self.scheduler.running:
            end = seq.num_computed_tokens
            for group, table in enumerate(tables_of(self.blocks, seq)):
                self.check_read(group, table, end, end, seq.token_ids)
                most = (self.windows[group] or self.size.max_len) - 1 + self.size.budget
                num_held = sum(block_id != 0 for block_id in table)
                assert num_held <= -(-most // self.block_size) + 1, "blocks outside the window are held"
        prefixes: dict[Any, tuple[int, ...]] = {}
        for block in self.blocks.blocks:
            if block.prefix is not None:
                last = block.block_id * self.block_size + self.block_size - 1
                group, tokens = self.cache[last]
                key = key_of(tokens, self.block_size, self.size.hash_function)
                assert block.prefix.key == key._replace(group=group), "a hit would be wrong"
                assert prefixes.setdefault(block.prefix, tokens) == tokens, "a prefix has two meanings"
                before, parent = tokens[: -self.block_size], block.prefix.parent
                expected = prefixes.setdefault(parent, before) if parent else ()
                assert before == expected, "a wrong parent"
                for i in range(1, self.block_size):
                    assert self.cache[last - i] == (group, tokens[:-i]), "a hit would be wrong"
        if isinstance(self.blocks, StatefulBlockManager):
            for seq, held in self.blocks.held.items():
                state = contents(seq, seq.token_ids, seq.num_computed_tokens)
                assert self.cache[STATE, held.source] == (STATE, state), "a state of other tokens"
            for prefix, slot in self.blocks.kept_slots.items():
                if prefix in prefixes:
                    assert self.cache[STATE, slot] == (STATE, prefixes[prefix]), "a hit would be wrong"

    def check(self) -> None:
        check_laws(self.scheduler)
        self.check_cache()
        for seq in self.seqs:
            assert not self.is_complete(seq), "a sequence goes on after its end"

    @staticmethod
    def is_complete(seq: Sequence) -> bool:
        return EOS in seq.token_ids or len(seq.token_ids) >= seq.max_num_tokens

    # -- the canonical state

    def key(self) -> bytes:
        """Return a digest of everything that the future depends on, up to names."""
        blocks, tokens, prefixes, slots = Names({0: 0}), Names(), Names({None: 0}), Names({ZERO_SLOT: 0})
        seqs, manager = self.seqs, self.blocks
        by_arrival = sorted(seq.seq_id for seq in seqs)
        state: list[Any] = []
        for seq in seqs:
            state += [
                (by_arrival.index(seq.seq_id), seq.priority, len(seq.block_table) > 0, seq.max_num_tokens),
                [tokens[token] for token in seq.token_ids],
                (seq.num_computed_tokens, seq.num_hit_tokens, seq.num_registered_blocks),
                [[blocks[block_id] for block_id in table] for table in tables_of(manager, seq)],
                self.failures.get(seq.seq_id) == len(seq.token_ids),
            ]
            if isinstance(manager, StatefulBlockManager):
                held = manager.held.get(seq)
                state.append(seq.num_prompt_tokens)
                if held is not None:
                    kept = held.kept if held.kept in manager.kept_slots else None
                    state.append((slots[held.slot], slots[held.source], held.keep_at, prefixes[kept]))
        state += [[blocks[block_id] for block_id in manager.free_blocks]]
        for block_id in [*blocks]:
            block = manager.blocks[block_id]
            if block.prefix is not None:
                group, content = self.cache[block_id * self.block_size + self.block_size - 1]
                state += [blocks[block_id], group, [tokens[token] for token in content]]
                state += [prefixes[block.prefix.parent], prefixes[block.prefix]]
        state += [[prefixes[seq.prefix] for seq in seqs]]
        twins = (prefix.blocks for prefix in manager.prefixes.values() if len(prefix.blocks) > 1)
        state += [sorted([blocks[block_id] for block_id in same] for same in twins)]
        if isinstance(manager, StatefulBlockManager):
            state += [[(prefixes[prefix], slots[slot]) for prefix, slot in manager.kept_slots.items()]]
            state += [[slots[slot] for slot in manager.free_slots]]
        for launch in self.core.in_flight:
            state += [[seqs.index(seq) if seq in seqs else -1 for seq in launch.batch.sampled_seqs]]
        return blake2b(marshal.dumps(state, 2), digest_size=12).digest()


def pending(seq: Sequence) -> int:
    """Return what stands for a sequence's pending token in the ledger."""
    return -1 - seq.seq_id


def contents(seq: Sequence, token_ids: list[int], end: int) -> tuple[int, ...]:
    """Return the first `end` tokens; the last may be pending."""
    return (*token_ids[:end], *([pending(seq)] if end > len(token_ids) else []))


class Names(dict):
    """Numbers keys in the order in which they are first looked up."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return len(self) - 1


# ---- The search ----------------------------------------------------------------------------------


class ViolationError(AssertionError):
    """A law does not hold. The message is the shortest script to it."""


def operations_of(world: World) -> Iterator[tuple[str, tuple]]:
    """Return the operations in a state, without failures."""
    if len(world.seqs) < world.size.num_seqs:
        prompts = [prompt for prompt in world.size.prompts if len(prompt) < world.scheduler.max_num_tokens]
        for prompt, priority in itertools.product(prompts, world.size.priorities):
            yield "add", (prompt, priority)
    if not world.is_idle:
        yield "step", ()
    for i in range(len(world.seqs)):
        yield "abort", (i,)
    yield "reset", ()


class Search:
    """Explores a world, breadth first."""

    def __init__(self, size: Size) -> None:
        first = World(size)
        self.numbers = {first.key(): 0}  # canonical state -> its number, in the order of discovery
        self.reached: list[tuple[int, tuple]] = [(-1, ())]  # by number: from which state, by which operation
        self.after_step: dict[int, int] = {}  # the state after a step that samples no end
        self.frontier = deque([(0, pickle.dumps(first))])
        self.num_transitions = 0

    def run(self) -> int:
        """Visit every reachable state. Returns how many there are."""
        while self.frontier:
            self.expand(*self.frontier.popleft())
        self.check_ends()
        return len(self.numbers)

    def expand(self, number: int, saved: bytes) -> None:
        """Apply each operation to a copy of a state, with each possible outcome."""
        before: World = pickle.loads(saved)
        for operation in operations_of(before):
            picks: tuple[int, ...] | None = ()
            while picks is not None:
                world, after = self.apply(number, saved, operation, picks)
                if operation[0] == "step" and not picks:
                    self.after_step[number] = after
                picks = world.choose.following()
        if not before.is_idle:
            calls = itertools.count(1)
            while self.apply(number, saved, ("fail", (next(calls),)))[1] >= 0:
                pass

    def apply(
        self, number: int, saved: bytes, operation: tuple, picks: tuple[int, ...] = ()
    ) -> tuple[World, int]:
        """Apply an operation to a copy of a state. Return it with its number, or -1 if nothing happened."""
        world: World = pickle.loads(saved)
        world.choose = Choices(picks)
        name, arguments = operation
        try:
            if getattr(world, name)(*arguments) is False:
                return world, -1
            world.check()
        except Exception as error:
            lines = [*self.script(number), describe(operation, world.choose.made), f"    {error!r}"]
            raise ViolationError("\n".join(lines)) from error
        self.num_transitions += 1
        key = world.key()
        if key not in self.numbers:
            self.numbers[key] = len(self.reached)
            self.reached.append((number, (operation, world.choose.made)))
            world.choose = Choices()
            self.frontier.append((self.numbers[key], pickle.dumps(world)))
        return world, self.numbers[key]

    def script(self, number: int) -> list[str]:
        """Return the shortest script to a state, one line per operation."""
        lines: list[str] = []
        while number > 0:
            number, step = self.reached[number]
            lines.append(describe(*step))
        return lines[::-1]

    def check_ends(self) -> None:
        """Check that steps alone lead from every state to the end of all sequences."""
        ends = {number for number in range(len(self.reached)) if number not in self.after_step}  # idle
        for number in range(len(self.reached)):
            path: dict[int, None] = {}
            while number not in ends:
                if number in path:
                    raise ViolationError("\n".join([*self.script(number), "    steps never end from here"]))
                path[number] = None
                number = self.after_step[number]
            ends |= path.keys()


def describe(operation: tuple, made: list) -> str:
    """Return an operation as a line of a script."""
    name, arguments = operation
    return " ".join([name, *map(str, arguments), *(["with", *map(str, made)] if made else [])])


# ---- The worlds ----------------------------------------------------------------------------------


def collide(content: bytes, parent: int) -> int:
    return 7


BRIEF: dict[str, Any] = {"draws": (0, EOS)}
ONE: Any = ((0, 1, 0),)
ALIKE = (0, 0, 0, 0, 1), (0, 1, 0, 0, 1)
SMALL = {  # a second of processor time each
    "small, preemption": Size(budget=2, **BRIEF),
    "small, all tokens": Size(prompts=ONE, draws=(0, 1, EOS, UNDRAWN), priorities=(0, -1)),
    "small, async": Size(max_in_flight=1, prompts=ONE, priorities=(0, -1), **BRIEF),
    "small, windows": Size(num_blocks=5, windows=(None, 2), prompts=ONE, max_in_flight=1, **BRIEF),
    "small, collisions": Size(num_blocks=6, max_len=6, prompts=ALIKE, hash_function=collide, **BRIEF),
    "small, drafts": Size(num_drafts=2, prompts=((0, 1),), budget=4, **BRIEF),
    "small, windows, drafts": Size(windows=(2,), num_blocks=4, num_drafts=1, prompts=ONE, **BRIEF),
    "small, states": Size(num_state_slots=2, prompts=ONE, budget=4, max_in_flight=1, **BRIEF),
}
THREE: dict[str, Any] = {"num_blocks": 5, "num_seqs": 3, "prompts": ((0, 1),), "draws": (0, EOS)}
LARGE = {
    "all": Size(),
    "priorities": Size(prompts=ONE, priorities=(0, -1), num_seqs=3),
    "three": Size(budget=2, **THREE),
    "three, async": Size(max_in_flight=1, **THREE),
    "long": Size(max_len=9, num_blocks=5, prompts=ONE, budget=4),
    "windows": Size(windows=(None, 2), max_len=7, num_blocks=8, prompts=ONE),
    "windows, drafts": Size(windows=(3,), num_blocks=5, num_drafts=2, prompts=ONE),
    "windows, async": Size(windows=(None, 3), num_blocks=6, max_in_flight=1),
    "drafts": Size(num_drafts=3, budget=4),
    "states": Size(num_state_slots=3),
    "states, async": Size(num_state_slots=4, max_in_flight=1, num_blocks=4),
    "states, windows": Size(num_state_slots=3, windows=(None, 2), num_blocks=6),
}


def explore(names: list[str]) -> None:
    """Print what each search visited, or the shortest script to a violation."""
    for name, size in (SMALL | LARGE).items():
        if not names or any(part in name for part in names):
            search, start = Search(size), time.perf_counter()
            counts = f"{search.run():9,} states {search.num_transitions:11,} transitions"
            print(f"{name:24} {counts} {(time.perf_counter() - start) / 60:6.2f} min", flush=True)


if __name__ == "__main__":
    explore(sys.argv[1:])
