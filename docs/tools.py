"""What the chapters from 4 on look through: the real BlockManager and Scheduler, with letters for tokens.

Sequences are named A, B, C, ... in the order of arrival. There is no model: whenever A is due a token, it
gets an "A", unless the chapter says which letter follows.
"""

from array import array
from collections.abc import Callable

from nanoengine.engine import Block, BlockManager, Scheduler, Sequence
from nanoengine.extensions.speculate import is_draft
from nanoengine.extensions.states import StatefulScheduler
from nanoengine.extensions.windows import WindowedBlockManager
from nanoengine.sampling_params import SamplingParams


def sequence(name: str, prompt: str, max_tokens: int = 16) -> Sequence:
    """A sequence whose tokens are the letters of its prompt."""
    return Sequence(ord(name) - ord("A"), [ord(c) for c in prompt], SamplingParams(max_tokens=max_tokens))


def name(seq: Sequence) -> str:
    """The letter it was named by."""
    return chr(ord("A") + seq.seq_id)


def text(seq: Sequence, start: int = 0, end: int | None = None) -> str:
    """Its tokens [start, end) as letters."""
    return "".join(map(chr, seq.token_ids[start:end]))


def tables(scheduler: Scheduler, seq: Sequence) -> str:
    """Its block table; where there are windows (chapter 12) one for each group of layers."""
    blocks = scheduler.block_manager
    by_group = blocks.tables_of(seq) if isinstance(blocks, WindowedBlockManager) else [seq.block_table]
    return " and ".join(map(str, by_group))


def states(scheduler: Scheduler, seq: Sequence) -> str:
    """Where its layers with states (chapter 14) take one and leave one, in this step."""
    if not isinstance(scheduler, StatefulScheduler):
        return ""
    spans = scheduler.spans[seq]
    return ", state " + ", ".join(f"[{start}, {end}) {a} -> {b}" for start, end, a, b in spans)


def step(scheduler: Scheduler, draw: Callable[[Sequence, str], str] = lambda seq, before: name(seq)) -> None:
    """Run one step, and print each chunk of it, then who was preempted, who took guesses, ended or waits.

    `draw` is the model: it returns the letter behind a sequence's text, to which guesses are added.
    """
    running = list(scheduler.running)
    batch = scheduler.schedule()
    drawn = []
    for chunk in batch.chunks:
        seq, start, end = chunk.seq, chunk.start, chunk.end
        before = "".join(map(chr, chunk.token_ids[:end]))
        if chunk.samples:
            drawn.append(draw(seq, before))
        verb = "tries" if is_draft(chunk) else "computes"
        print(
            f"{name(seq)} {verb} [{start}, {end}) {before[start:]} in blocks {tables(scheduler, seq)}"
            + states(scheduler, seq)
            + (f", draws {drawn[-1]}" if chunk.samples else "")
        )
    for seq in running:
        if seq not in scheduler.running:
            print(f"{name(seq)} is preempted")
    num_before = {seq: len(seq.token_ids) for seq in batch.sampled_seqs}
    advanced = scheduler.update(batch, [ord(letter) for letter in drawn])
    for seq in advanced:
        if batch.sampled_seqs.count(seq) > 1:
            print(f"{name(seq)} takes {text(seq, num_before[seq])}")
        if seq.is_finished:
            print(f"{name(seq)} ends: {text(seq)}")
    if scheduler.waiting:
        print("waiting:", *map(name, scheduler.waiting))


def show(manager: BlockManager) -> None:
    """Print every block, and the order in which free ones will be taken."""
    for block in manager.blocks[1:]:
        users = f"in use by {block.ref_count}" if block.ref_count else "free"
        print(f"{block.block_id} {content(block)} {users}")
    free = [*manager.empty_blocks, *manager.evictable_blocks.values()]
    print("next to be taken:", *(block.block_id for block in free))


def content(block: Block) -> str:
    """What the prefix cache can find in it, as letters; dots where it can find nothing."""
    return "...." if block.key is None else "".join(map(chr, array("i", block.key.content)))
