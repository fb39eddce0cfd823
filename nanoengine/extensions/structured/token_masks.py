"""Structured outputs: JSON that fits a schema, a regular expression, one of several texts, or a grammar.

Before each token, the grammar computes a mask of the tokens that can come next. The logits of all others
become minus infinity. Tokens that end a sequence are allowed exactly where the grammar may end. grammars.py
compiles the grammars with llguidance, a parser over the vocabulary's trie.

A `Constraint` depends only on its sequence's tokens, which preemptions and failed steps do not change. Before
each mask, its matcher consumes the tokens appended since the last one, or is rolled back to them.

Masks are computed while the forward pass runs. Once a mask of a grammar takes more than 10 ms, a thread
outside the steps computes its masks, and its sequences skip steps until theirs are ready.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from nanoengine import engine
from nanoengine.backends.device import upload
from nanoengine.extensions.structured.grammars import SLOW_SECONDS, Compiler, Trials
from nanoengine.sampling.sampler import SamplingRow
from nanoengine.sampling_params import StructuredOutputsParams

MAX_GRAMMARS = 128  # size of the cache of compiled grammars
END = "<|end of the grammar|>"  # stands for every token that ends a sequence


@dataclass(slots=True)
class Grammar:
    """Holds a compiled grammar, shared by all samples that request it."""

    matcher: Any  # llguidance's matcher in its initial state; each sample has a copy
    first_mask: NDArray[np.uint32]  # (words,), the mask of the first output token
    takes_back: bool  # whether the matcher can be rolled back
    is_slow: bool  # whether a mask took more than SLOW_SECONDS; the threads that compute masks set it


class Grammars:
    """Compiles requests' structured outputs, and caches the most recently used grammars. Thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        try:
            import llguidance  # noqa: F401
        except ImportError:
            raise ValueError(
                "structured_outputs needs the package llguidance: pip install 'nanoengine[structured]'"
            ) from None
        if tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer, and the checkpoint has none")
        self.vocab_size = vocab_size
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_padding()
        backend.no_truncation()
        backend.add_special_tokens([END])
        self.end_id = cast(int, backend.token_to_id(END))
        num_tokens = max(vocab_size, self.end_id + 1)
        settings = backend.to_str(), num_tokens, self.end_id
        self.compiler, self.trials = Compiler(*settings), Trials(*settings)
        num_threads = torch.get_num_threads()
        self.threads = mask_threads(max(1, num_threads - 1), niceness=0)
        self.slow_threads = mask_threads(max(1, num_threads // 2), niceness=10)
        self.num_words = -(-num_tokens // 32)
        self.biases: Tensor | None = None  # `BIASES`, in the form of the logits
        self._cached = lru_cache(MAX_GRAMMARS)(self._compile)

    def compile(self, asked: StructuredOutputsParams) -> Callable[[], "Constraint"]:
        """Compile a grammar, and return a function that makes a constraint for each sample of a request.

        Raises ValueError if it is invalid or too large, no finite text conforms to it, or a part cannot be
        enforced.
        """
        try:
            grammar = self._cached(json.dumps(asdict(asked)))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs: {error}") from None
        return lambda: Constraint(self, grammar)

    def close(self) -> None:
        """End the threads once they have computed the masks that they began."""
        for pool in (self.threads, self.slow_threads):
            pool.shutdown(wait=False, cancel_futures=True)

    def fill_masks(self, items: Sequence[tuple["Constraint", SamplingRow]]) -> NDArray[np.uint32]:
        """Return the mask of each row, (rows, words) uint32, a bit per token. Several threads compute them.

        A constraint that cannot be followed, or only at too high a cost, fails: its rows allow no token.
        """
        masks = np.zeros((len(items), self.num_words), dtype=np.uint32)
        jobs: list[tuple[Constraint, int, list[int]]] = []
        for _, group in groupby(range(len(items)), key=lambda place: id(items[place][0])):
            place, *more = group
            constraint, row = items[place]
            mask = None if more else constraint.known_mask(row.output_ids)
            if mask is not None:
                masks[place] = mask
                continue
            if not constraint.catch_up(row.output_ids):
                cause = constraint.matcher.get_error() or "a draft"
                constraint.failure = f"the grammar does not go on: {cause}"
                continue
            last = items[more[-1]][1] if more else row
            jobs.append((constraint, place, list(last.token_ids[row.position : last.position])))
        if jobs:
            num_parts = min(len(jobs), torch.get_num_threads())
            first, *others = (jobs[i::num_parts] for i in range(num_parts))
            begun = [self.threads.submit(compute_masks, part, masks) for part in others]
            compute_masks(first, masks)
            for part in begun:
                part.result()
        for place, (constraint, _) in enumerate(items):
            if constraint.matcher.is_error():
                constraint.failure = f"the grammar is too costly: {constraint.matcher.get_error()}"
                masks[place] = 0
        return masks

    def let_end(self, masks: NDArray[np.uint32], stop_ids: Sequence[frozenset[int]]) -> list[tuple[int, int]]:
        """Set the bits of each row's stop tokens where its grammar may end, and clear the others, in place.

        Return (row, stop token) pairs of the rows where the grammar has to end.
        """
        word, bit = divmod(self.end_id, 32)
        may_end = (masks[:, word] >> np.uint32(bit) & np.uint32(1)).tolist()
        masks[:, word] &= ~np.uint32(1 << bit)
        goes_on = np.asarray(masks.any(axis=1)).tolist()
        ends = []
        for i, ids in enumerate(stop_ids):
            for token_id in ids:
                word, bit = divmod(token_id, 32)
                others = masks[i, word] & ~np.uint32(1 << bit)
                masks[i, word] = others | np.uint32(may_end[i] << bit)
                if may_end[i] and not goes_on[i]:
                    ends.append((i, token_id))
        return ends

    def _compile(self, asked: str) -> Grammar:
        """Try StructuredOutputsParams, given as JSON, in another process, then compile them here."""
        tried = self.trials.run(json.loads(asked))
        matcher = self.compiler.matcher(tried.grammar)
        return Grammar(matcher, self.mask_of(matcher), tried.takes_back, tried.is_slow)

    @staticmethod
    def is_ready(seq: engine.Sequence) -> bool:
        """Return whether a sequence can be computed now, without waiting for a slow mask."""
        return late_mask(seq) is None

    def mask_of(self, matcher: Any) -> NDArray[np.uint32]:
        """Return the mask of the tokens that may come next, (words,)."""
        return np.frombuffer(matcher.compute_bitmask(), np.uint32)[: self.num_words]


# Value of a mask's byte -> what is added to the logits of its eight tokens, the lowest bit first: (256, 8).
BIASES = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, 0, -np.inf).astype(np.float32)


class Constraint:
    """Restricts a sample to the tokens that its grammar allows. It is a `RowProcessor`."""

    is_mask: ClassVar[bool] = True
    failure: str | None = None

    def __init__(self, grammars: Grammars, grammar: Grammar) -> None:
        self.grammars, self.grammar = grammars, grammar
        self.matcher = grammar.matcher.deep_copy()
        self.consumed: list[int] = []  # the tokens that the matcher has consumed
        # The number of output tokens, and the mask after them that a thread computes outside the steps. Until
        # it is done, only that thread may use the matcher.
        self.ahead: tuple[int, Future[NDArray[np.uint32] | None]] | None = None

    def catch_up(self, output_ids: Sequence[int]) -> bool:
        """Move the matcher to the end of these tokens. Returns False if they do not conform, or it fails."""
        output_ids, num_same = list(output_ids), len(self.consumed)
        if output_ids[:num_same] != self.consumed:  # it has consumed a draft token that was rejected
            pairs = enumerate(zip(output_ids, self.consumed, strict=False))
            num_same = next((i for i, (one, other) in pairs if one != other), len(output_ids))
            self.matcher.rollback(len(self.consumed) - num_same)
            del self.consumed[num_same:]
        if new := output_ids[num_same:]:
            self.consumed += new[: self.matcher.try_consume_tokens(new)]
        return len(self.consumed) == len(output_ids)

    def compute_ahead(self, output_ids: list[int]) -> Future[Any]:
        """Return the future of the mask after these tokens. A thread outside the steps computes it."""
        if self.ahead is None or self.ahead[0] != len(output_ids):
            self.ahead = len(output_ids), self.grammars.slow_threads.submit(self._mask_after, output_ids)
        return self.ahead[1]

    def _mask_after(self, output_ids: list[int]) -> NDArray[np.uint32] | None:
        return self.grammars.mask_of(self.matcher) if self.catch_up(output_ids) else None

    def known_mask(self, output_ids: Sequence[int]) -> NDArray[np.uint32] | None:
        """Return the mask after these tokens if it is the first or computed by a thread, else None."""
        mask = None
        if self.ahead is not None:
            num_tokens, job = self.ahead
            found = job.result()  # usually done: its sequence waited for it. Frees the matcher in any case
            mask = found if num_tokens == len(output_ids) else None
        return mask if output_ids else self.grammar.first_mask

    def allowed(self, output_ids: list[int]) -> tuple[set[int], bool]:
        """Return the tokens that may come after these, and whether the output may end there."""
        mask = self.known_mask(output_ids)
        if mask is None:
            self.catch_up(output_ids)
            mask = self.grammars.mask_of(self.matcher)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        ids, end_id = set(np.flatnonzero(bits).tolist()), self.grammars.end_id
        return ids - {end_id}, end_id in ids

    @staticmethod
    def apply(logits: Tensor, items: Sequence[tuple[int, "Constraint", SamplingRow]]) -> None:
        """Set the logits of tokens that the grammars do not allow to -inf, as in `RowProcessor.apply`."""
        grammars = items[0][1].grammars
        masks = grammars.fill_masks([(constraint, row) for _, constraint, row in items])
        rows = np.array([i for i, _, _ in items])
        ends = grammars.let_end(masks, [row.stop_ids for _, _, row in items])
        if ends:  # undo any ban of these stop tokens: no other token can follow
            places, token_ids = upload(np.array(ends).T, logits.device)
            logits.index_put_((upload(rows, logits.device)[places], token_ids), logits.new_zeros(()))
        if grammars.biases is None or grammars.biases.dtype != logits.dtype:
            grammars.biases = upload(BIASES, logits.device).to(logits.dtype)
        table = grammars.biases
        octets, vocab_size = upload(masks.view(np.uint8), logits.device), logits.shape[1]

        def biases_of(octets: Tensor) -> Tensor:
            return torch.nn.functional.embedding(octets.int(), table).flatten(-2)[..., :vocab_size]

        if logits.is_cuda:
            logits.index_add_(0, upload(rows, logits.device), biases_of(octets))
        else:  # one row at a time, which stays in the processor's caches
            for i, row in zip(rows.tolist(), octets, strict=True):
                logits[i] += biases_of(row)


def mask_threads(num: int, niceness: int) -> ThreadPoolExecutor:
    """Return a pool of threads for masks, which may run on all cores that the caller may use."""
    if sys.platform != "linux":
        return ThreadPoolExecutor(num)
    cores = os.sched_getaffinity(0)

    def begin() -> None:
        os.sched_setaffinity(0, cores)  # not only the core that a compute thread is pinned to
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)

    return ThreadPoolExecutor(num, initializer=begin)


def compute_masks(jobs: Sequence[tuple[Constraint, int, list[int]]], masks: NDArray[np.uint32]) -> None:
    """Fill rows of masks, (rows, words), in place, and record which grammars are slow.

    A job is a constraint whose matcher has consumed the output, its first row, and its draft tokens. They use
    the rows after it. Rows after a draft token that does not conform stay 0.
    """
    num_bytes = masks.strides[0]
    for constraint, place, drafts in jobs:
        matcher, num_taken = constraint.matcher, 0
        for i in range(len(drafts) + 1):
            start = time.thread_time()
            matcher.unsafe_compute_mask_ptr(masks.ctypes.data + (place + i) * num_bytes, num_bytes)
            if time.thread_time() - start > SLOW_SECONDS:
                constraint.grammar.is_slow = True
            if i == len(drafts) or not matcher.try_consume_tokens(drafts[i : i + 1]):
                break
            num_taken += 1
        if num_taken:
            matcher.rollback(num_taken)


def wait_for_mask(seqs: Iterable[engine.Sequence]) -> None:
    """Wait until the mask of one of these sequences is ready, unless none of them waits for its mask."""
    wait([job for seq in seqs if (job := late_mask(seq)) is not None], return_when=FIRST_COMPLETED)


def late_mask(seq: engine.Sequence) -> Future[Any] | None:
    """Return the future of a sequence's next mask if its grammar is slow and the mask is not ready."""
    for one in seq.processors:
        if isinstance(one, Constraint) and one.grammar.is_slow and seq.num_output_tokens:
            job = one.compute_ahead(seq.token_ids[seq.num_prompt_tokens :])
            return None if job.done() else job
    return None


class GrammarProposer:
    """Proposes draft tokens that conform to a grammar: tokens it forces, else those of another proposer."""

    def __init__(self, propose: Callable[[Any, int], list[int]], max_drafts: int) -> None:
        self.propose, self.max_drafts = propose, max_drafts

    def __call__(self, seq: Any, num_tokens: int) -> list[int]:
        """Return at most num_tokens draft tokens for a sequence."""
        constraint = next((one for one in seq.processors if isinstance(one, Constraint)), None)
        if constraint is None:
            return self.propose(seq, num_tokens)
        grammar, output_ids = constraint.grammar, seq.token_ids[seq.num_prompt_tokens :]
        if grammar.is_slow or not grammar.takes_back or not constraint.catch_up(output_ids):
            return []
        forced: list[int] = constraint.matcher.compute_ff_tokens()
        drafts = forced[: min(num_tokens, self.max_drafts)] or self.propose(seq, num_tokens)
        return drafts[: constraint.matcher.validate_tokens(drafts)] if drafts else []
