"""Tools for the lessons from 4 on: they drive the real BlockManager and Scheduler, with letters as tokens.

Sequences are named A, B, C, ... in order of arrival. There is no model: whenever A samples a token, the token
is "A", unless the lesson says which letter follows.
"""

from array import array
from collections.abc import Callable

from nanoengine.engine import Block, BlockManager, Scheduler, Sequence
from nanoengine.extensions.recurrent_states import StatefulScheduler
from nanoengine.extensions.sliding_windows import WindowedBlockManager
from nanoengine.extensions.speculative_decoding import is_draft
from nanoengine.sampling_params import SamplingParams


def sequence(name: str, prompt: str, max_tokens: int = 16) -> Sequence:
    """Return a sequence that has the letters of its prompt as tokens."""
    return Sequence(ord(name) - ord("A"), [ord(c) for c in prompt], SamplingParams(max_tokens=max_tokens))


def name(seq: Sequence) -> str:
    """Return the letter that names the sequence."""
    return chr(ord("A") + seq.seq_id)


def text(seq: Sequence, start: int = 0, end: int | None = None) -> str:
    """Return the sequence's tokens [start, end) as letters."""
    return "".join(map(chr, seq.token_ids[start:end]))


def tables(scheduler: Scheduler, seq: Sequence) -> str:
    """Return the sequence's block table. With windows (lesson 18) there is one per group of layers."""
    blocks = scheduler.block_manager
    by_group = blocks.tables_of(seq) if isinstance(blocks, WindowedBlockManager) else [seq.block_table]
    return " and ".join(map(str, by_group))


def states(scheduler: Scheduler, seq: Sequence) -> str:
    """Return which recurrent states (lesson 18) this step reads and writes for the sequence."""
    if not isinstance(scheduler, StatefulScheduler):
        return ""
    spans = scheduler.spans[seq]
    return ", state " + ", ".join(f"[{start}, {end}) {a} -> {b}" for start, end, a, b in spans)


def step(
    scheduler: Scheduler, sample: Callable[[Sequence, str], str] = lambda seq, before: name(seq)
) -> None:
    """Run one step, and print each of its chunks, then which sequences were preempted, finished or wait.

    `sample` is the model: it returns the letter that follows a sequence's text, including draft tokens.
    """
    running = list(scheduler.running)
    batch = scheduler.schedule()
    sampled = []
    for chunk in batch.chunks:
        seq, start, end = chunk.seq, chunk.start, chunk.end
        before = "".join(map(chr, chunk.token_ids[:end]))
        if chunk.samples:
            sampled.append(sample(seq, before))
        verb = "verifies" if is_draft(chunk) else "computes"
        print(
            f"{name(seq)} {verb} [{start}, {end}) {before[start:]} in blocks {tables(scheduler, seq)}"
            + states(scheduler, seq)
            + (f", samples {sampled[-1]}" if chunk.samples else "")
        )
    for seq in running:
        if seq not in scheduler.running:
            print(f"{name(seq)} is preempted")
    num_before = {seq: len(seq.token_ids) for seq in batch.sampled_seqs}
    advanced = scheduler.update(batch, [ord(letter) for letter in sampled])
    for seq in advanced:
        if batch.sampled_seqs.count(seq) > 1:
            print(f"{name(seq)} keeps {text(seq, num_before[seq])}")
        if seq.is_finished:
            print(f"{name(seq)} ends: {text(seq)}")
    if scheduler.waiting:
        print("waiting:", *map(name, scheduler.waiting))


def show(manager: BlockManager) -> None:
    """Print every block, and the order in which free blocks will be allocated."""
    for block in manager.blocks[1:]:
        users = f"in use by {block.ref_count}" if block.ref_count else "free"
        print(f"{block.block_id} {content(block)} {users}")
    print("allocated next:", *manager.free_blocks)


def content(block: Block) -> str:
    """Return the block's registered content as letters, or dots if the prefix cache cannot find it."""
    return "...." if block.prefix is None else "".join(map(chr, array("i", block.prefix.key.content)))
