"""The conservation laws of blocks and queues, checked by tests after each operation."""

import itertools
from array import array
from collections import Counter, abc
from collections.abc import Callable, Iterable

from xxhash import xxh3_64_intdigest

from nanoengine.backends.step_inputs import NUM_RESERVED_SLOTS
from nanoengine.engine import BlockKey, BlockManager, Scheduler, Sequence
from nanoengine.extensions.recurrent_states import StatefulBlockManager, StatefulScheduler
from nanoengine.extensions.sliding_windows import WindowedBlockManager


def tables_of(manager: BlockManager, seq: Sequence) -> list[list[int]]:
    """Return a sequence's block tables, one per group of layers; none while it waits."""
    if isinstance(manager, WindowedBlockManager):
        return manager.tables_of(seq)
    return [seq.block_table] if seq.block_table else []


def chain(
    token_ids: abc.Sequence[int],
    block_size: int,
    hash_function: Callable[[bytes, int], int] = xxh3_64_intdigest,
) -> BlockKey:
    """Return the key of the last block that the tokens fill, by the definition."""
    key = BlockKey(0, b"")
    for i in range(0, len(token_ids), block_size):
        content = array("i", token_ids[i : i + block_size]).tobytes()
        key = BlockKey(hash_function(content, key.hash), content)
    return key


def check_blocks(manager: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Assert that every block is where it belongs. `sequences` are all that hold blocks."""
    sequences = list(sequences)
    tables = [table for seq in sequences for table in tables_of(manager, seq)]
    uses = Counter(block_id for table in tables for block_id in table if block_id)
    assert all(block.ref_count == uses[block.block_id] for block in manager.blocks)
    free = [*manager.free_blocks.values()]
    unused = [block.block_id for block in manager.blocks[1:] if block.ref_count == 0]
    assert sorted(block.block_id for block in free) == unused, "a block is lost, or free twice"
    assert all(manager.blocks[block_id] is block for block_id, block in manager.free_blocks.items())
    is_registered = [block.prefix is not None for block in free]
    assert is_registered == sorted(is_registered), "a registered block would be reused before an empty one"
    findable = {
        block_id: block for prefix in manager.prefixes.values() for block_id, block in prefix.blocks.items()
    }
    registered = {block.block_id: block for block in manager.blocks if block.prefix is not None}
    assert findable == registered, "a registered block cannot be found, or the reverse"
    for (key, parent), prefix in manager.prefixes.items():
        assert (prefix.key, prefix.parent) == (key, parent)
        assert all(block.prefix is prefix for block in prefix.blocks.values())
        assert prefix.blocks, "a prefix without blocks was left behind"
    for seq in sequences:
        shortest = min(map(len, tables_of(manager, seq)), default=0)
        assert seq.capacity == shortest * manager.block_size
        assert seq.num_computed_tokens <= seq.capacity, "more computed tokens than room"
    if isinstance(manager, WindowedBlockManager):
        assert manager.more_tables.keys() == set(sequences), "tables of a sequence without blocks"
    if isinstance(manager, StatefulBlockManager):
        assert manager.held.keys() == set(sequences), "a sequence runs without a state, or waits with one"
        slots = [*manager.free_slots, *manager.kept_slots.values(), *(x.slot for x in manager.held.values())]
        usable = range(NUM_RESERVED_SLOTS, NUM_RESERVED_SLOTS + manager.num_state_slots)
        assert sorted(slots) == [*usable], "a slot is lost, or has two uses"


def check_laws(scheduler: Scheduler) -> None:
    """Assert that the queues and the blocks agree with each other."""
    for queue in (scheduler.waiting, scheduler.running):
        assert not any(seq.is_finished for seq in queue)
        orders = [seq.order for seq in queue]
        assert all(before < after for before, after in itertools.pairwise(orders))
    for seq in scheduler.waiting:
        assert (seq.block_table, seq.capacity, seq.num_computed_tokens, seq.num_hit_tokens) == ([], 0, 0, 0)
        assert (seq.num_registered_blocks, seq.prefix) == (0, None)
    assert all(seq.block_table for seq in scheduler.running)
    assert len(scheduler.running) <= scheduler.max_num_seqs, "more sequences run than max_num_seqs"
    check_blocks(scheduler.block_manager, scheduler.running)
    if isinstance(scheduler, StatefulScheduler):
        written = {span.target: seq for seq, spans in scheduler.spans.items() for span in spans}
        uses = [(slot, seq) for seq, spans in scheduler.spans.items() for span in spans for slot in span[2:]]
        assert all(written.get(slot, seq) is seq for slot, seq in uses), "two sequences share a written state"
