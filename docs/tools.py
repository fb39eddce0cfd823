"""What chapters 4 to 8 look through: the real BlockManager and Scheduler, with letters for tokens.

Sequences are named A, B, C, ... in the order of arrival. There is no model: whatever A is due a token, it
gets an "A".
"""

from array import array

from nanoengine.engine import Block, BlockManager, Scheduler, Sequence
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


def step(scheduler: Scheduler) -> None:
    """Run one step, and print each chunk of it, then who was preempted, who ended and who waits."""
    running = list(scheduler.running)
    batch = scheduler.schedule()
    for seq, start, end, is_last, _ in batch.chunks:
        due = f", draws {name(seq)}" if is_last else ""
        print(
            f"{name(seq)} computes [{start}, {end}) {text(seq, start, end)} in blocks {seq.block_table}{due}"
        )
    for seq in running:
        if seq not in scheduler.running:
            print(f"{name(seq)} is preempted")
    took = scheduler.update(batch, [ord(name(seq)) for seq in batch.sampled_seqs])
    for seq in took:
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
