"""Answers with a form: JSON that fits a schema, a regular expression, one of several texts, a grammar.

Before each token the grammar is asked which ones can come next, given the output so far: a mask, one bit for
each token of the vocabulary. The logits of all others become minus infinity, and a token is drawn as always.
Where the answer may end, the tokens that end a sequence are let through too, and only there.

A `Constraint` goes by its sequence's tokens alone, which preemptions and failed steps leave as they are. So
nobody tells it anything: before each mask it catches up with what the sequence has taken since the last one.
Behind each draft (speculate.py) there is a mask too, and the drafts are taken back.

The grammars are llguidance's, a parser over the vocabulary's trie: https://github.com/guidance-ai/llguidance

forms.py makes llguidance's grammars of what requests ask for, and tries each out in another process first.

Most masks take well under a millisecond. They are computed when the forward pass was launched, on a GPU while
that runs. A form is slow once a mask of it took more than 10 ms of a processor, at the latest in a step. From
then on its masks are computed by a thread beside the steps, and its sequences sit steps out until theirs are
ready: they wait, and the rest of the batch does not. Which tokens are drawn does not depend on it.
"""

import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

import nanoengine.extensions.forms as forms
from nanoengine import engine
from nanoengine.backends.device import upload
from nanoengine.engine import ScheduledBatch, Scheduler
from nanoengine.requests import CheckedRequest
from nanoengine.sampling import SamplingRow
from nanoengine.sampling_params import StructuredOutputsParams

MAX_GRAMMARS = 128  # that are kept
END = "<|end of the grammar|>"  # stands for every token that ends a sequence


@dataclass(slots=True)
class Form:
    """A compiled form, which all samples that ask for it share."""

    matcher: Any  # llguidance's, at the beginning of an answer; each sample has a copy
    first_mask: NDArray[np.uint32]  # (words,), of an answer's first token
    takes_back: bool  # whether it can take tokens back
    is_slow: bool  # whether a mask took more than SLOW_SECONDS; the threads that compute masks set it


class Grammars:
    """Compiles what requests ask for, and keeps the grammars used last. For several threads.

    Args:
        tokenizer: the model's, a transformers one.
        vocab_size: of its logits.

    Raises:
        ValueError: llguidance is not installed, or does not take the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        try:
            import llguidance  # noqa: F401
        except ImportError:
            raise ValueError(
                "structured_outputs need the package llguidance: pip install 'nanoengine[structured]'"
            ) from None
        if tokenizer is None:
            raise ValueError("structured_outputs need a tokenizer and the checkpoint has none")
        self.vocab_size = vocab_size
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_padding()
        backend.no_truncation()
        backend.add_special_tokens([END])
        self.end_id = cast(int, backend.token_to_id(END))
        num_tokens = max(vocab_size, self.end_id + 1)
        settings: dict[str, Any] = {
            "tokenizer": backend.to_str(),
            "num_tokens": num_tokens,
            "end_id": self.end_id,
            "special_tokens": [token.content for token in tokenizer.added_tokens_decoder.values()],
        }
        self.compiler, self.trials = forms.Compiler(**settings), forms.Trials(**settings)
        num_threads = torch.get_num_threads()
        self.threads = mask_threads(max(1, num_threads - 1), niceness=0)
        self.slow_threads = mask_threads(max(1, num_threads // 2), niceness=10)
        self.num_words = -(-num_tokens // 32)
        self.has_slow = False  # whether a form is
        self._biases: Tensor | None = None
        self._compiled: OrderedDict[str, Form] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, asked: StructuredOutputsParams) -> Callable[[], "Constraint"]:
        """What makes a constraint for each sample of a request.

        Raises:
            ValueError: no grammar, too large a one, one that no text conforms to, or one with parts that
                would not be enforced.
        """
        try:
            key = repr(asked)
            with self._lock:
                form = self._compiled.get(key)
            if form is None:
                form = self._compile(asked)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs: {error}") from None
        with self._lock:
            self._compiled[key] = form
            self._compiled.move_to_end(key)
            while len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        return lambda: Constraint(self, form)

    def check_beginning(self, constraint: "Constraint", checked: CheckedRequest) -> None:
        """Raise ValueError where a request's bans leave none of the tokens that its form may begin with."""
        params = checked.params
        mask = constraint.form.first_mask[None].copy()
        if self.let_end(mask, [checked.stop_ids]):
            return
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocab_size].astype(bool)
        if params.allowed_token_ids is not None:
            allowed &= np.isin(np.arange(self.vocab_size), params.allowed_token_ids)
        allowed[[ids[0] for ids in checked.bad_words if len(ids) == 1]] = False
        if params.min_tokens:
            allowed[list(checked.stop_ids)] = False
        if not allowed.any():
            raise ValueError(
                "structured_outputs: of the tokens that the form may begin with none is left by "
                f"allowed_token_ids={params.allowed_token_ids}, bad_words={params.bad_words}, "
                f"min_tokens={params.min_tokens} and stop_token_ids={params.stop_token_ids}"
            )

    def fill_masks(self, items: Sequence[tuple["Constraint", SamplingRow]]) -> NDArray[np.uint32]:
        """What may come next in each row, (rows, words) uint32, a bit per token; several at a time.

        Raises:
            ValueError: a grammar was too costly to follow.
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
            conforms = constraint.catch_up(row.output_ids)
            if not conforms:
                raise ValueError(f"the grammar does not go on: {constraint.matcher.get_error() or 'a draft'}")
            last = items[more[-1]][1] if more else row
            jobs.append((constraint, place, list(last.token_ids[row.position : last.position])))
        if jobs:
            num_parts = min(len(jobs), torch.get_num_threads())
            first, *others = (jobs[i::num_parts] for i in range(num_parts))
            begun = [self.threads.submit(compute_masks, part, masks) for part in others]
            compute_masks(first, masks)
            for part in begun:
                part.result()
        for constraint, _ in items:
            if constraint.matcher.is_error():
                raise ValueError(f"the grammar is too costly: {constraint.matcher.get_error()}")
        return masks

    def let_end(self, masks: NDArray[np.uint32], stop_ids: Sequence[frozenset[int]]) -> list[tuple[int, int]]:
        """Set the bits of the tokens that end each row's sequence where the grammar may end; in place.

        Returns:
            (row, token) of rows where nothing else can come.
        """
        word, bit = divmod(self.end_id, 32)
        may_end = (masks[:, word] >> np.uint32(bit) & np.uint32(1)).tolist()
        masks[:, word] &= ~np.uint32(1 << bit)
        goes_on = np.asarray(masks.any(axis=1)).tolist()
        ends = []
        for i, ids in enumerate(stop_ids):
            for token_id in ids:
                word, bit = divmod(token_id, 32)
                if may_end[i]:
                    masks[i, word] |= np.uint32(1 << bit)
                else:
                    masks[i, word] &= ~np.uint32(1 << bit)
                if may_end[i] and not goes_on[i]:
                    ends.append((i, token_id))
        return ends

    def biases_like(self, logits: Tensor) -> Tensor:
        """`BIASES` where and as the logits are."""
        if self._biases is None or self._biases.dtype != logits.dtype:
            self._biases = upload(BIASES, logits.device).to(logits.dtype)
        return self._biases

    def _compile(self, asked: StructuredOutputsParams) -> "Form":
        """Try a form out where that can be ended, then compile it here."""
        tried = self.trials.run(asked)
        matcher = self.compiler.matcher(tried.grammar)
        first_mask = self.mask_of(matcher)
        self.has_slow = self.has_slow or tried.is_slow
        return Form(matcher, first_mask, tried.takes_back, tried.is_slow)

    def mask_of(self, matcher: Any) -> NDArray[np.uint32]:
        """Return what may come next, (words,)."""
        return np.frombuffer(matcher.compute_bitmask(), np.uint32)[: self.num_words]


# ---- A constraint of one sample ------------------------------------------------------------------

# What a mask's byte adds to the logits of its eight tokens, the lowest bit first: (256, 8).
BIASES = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, 0, -np.inf).astype(np.float32)


class Constraint:
    """What a grammar lets a sample say next; a `RowProcessor`."""

    is_mask: ClassVar[bool] = True
    failure: str | None = None

    def __init__(self, grammars: Grammars, form: Form) -> None:
        self.grammars, self.form = grammars, form
        self.matcher = form.matcher.deep_copy()
        self.consumed: list[int] = []  # what the matcher has seen
        # What a thread computes beside the steps, after how many tokens. It has the matcher until it is done.
        self.ahead: tuple[int, Future[NDArray[np.uint32] | None]] | None = None

    def catch_up(self, output_ids: Sequence[int]) -> bool:
        """Bring the matcher behind these tokens; False where they do not conform, or it has failed."""
        output_ids, num_same = list(output_ids), len(self.consumed)
        if output_ids[:num_same] != self.consumed:  # it had seen a draft that did not come true
            pairs = enumerate(zip(output_ids, self.consumed, strict=False))
            num_same = next((i for i, (one, other) in pairs if one != other), len(output_ids))
            self.matcher.rollback(len(self.consumed) - num_same)
            del self.consumed[num_same:]
        if new := output_ids[num_same:]:
            self.consumed += new[: self.matcher.try_consume_tokens(new)]
        return len(self.consumed) == len(output_ids)

    def compute_ahead(self, output_ids: list[int]) -> Future[Any]:
        """Have the mask after these tokens computed beside the steps, or return what computes it."""
        if self.ahead is None or self.ahead[0] != len(output_ids):
            job = self.grammars.slow_threads.submit(self._mask_after, output_ids)
            self.ahead = len(output_ids), job
        return self.ahead[1]

    def _mask_after(self, output_ids: list[int]) -> NDArray[np.uint32] | None:
        if not self.catch_up(output_ids):
            return None
        return self.grammars.mask_of(self.matcher)

    def known_mask(self, output_ids: Sequence[int]) -> NDArray[np.uint32] | None:
        """Return the mask after these tokens if it was computed before, or is being computed."""
        mask = None
        if self.ahead is not None:
            num_tokens, job = self.ahead
            mask = job.result()  # its sequence has waited for it; else the matcher is not free before
            mask = mask if num_tokens == len(output_ids) else None
        return mask if output_ids else self.form.first_mask

    @staticmethod
    def apply(logits: Tensor, items: Sequence[tuple[int, "Constraint", SamplingRow]]) -> None:
        """As `RowProcessor.apply`.

        Raises:
            ValueError: a grammar was too costly to follow.
        """
        grammars = items[0][1].grammars
        masks = grammars.fill_masks([(constraint, row) for _, constraint, row in items])
        rows = np.array([i for i, _, _ in items])
        ends = grammars.let_end(masks, [row.stop_ids for _, _, row in items])
        if ends:  # whatever else the request asked of these tokens: it cannot go on
            places, token_ids = upload(np.array(ends).T, logits.device)
            logits.index_put_((upload(rows, logits.device)[places], token_ids), logits.new_zeros(()))
        table = grammars.biases_like(logits)
        octets, vocab_size = upload(masks.view(np.uint8), logits.device), logits.shape[1]

        def biases_of(octets: Tensor) -> Tensor:
            return torch.nn.functional.embedding(octets.int(), table).flatten(-2)[..., :vocab_size]

        if logits.is_cuda:
            logits.index_add_(0, upload(rows, logits.device), biases_of(octets))
        else:  # a row at a time, which stays in the processor's caches
            for i, row in zip(rows.tolist(), octets, strict=True):
                logits[i] += biases_of(row)


def mask_threads(num: int, niceness: int) -> ThreadPoolExecutor:
    """Return threads for masks, which may use all cores that the caller may."""
    if sys.platform != "linux":
        return ThreadPoolExecutor(num)
    cores = os.sched_getaffinity(0)

    def begin() -> None:
        os.sched_setaffinity(0, cores)  # not the one core of a thread that computes
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)

    return ThreadPoolExecutor(num, initializer=begin)


def compute_masks(jobs: Sequence[tuple[Constraint, int, list[int]]], masks: NDArray[np.uint32]) -> None:
    """Fill rows of masks, (rows, words), and note which forms are slow.

    Args:
        jobs: constraints at the end of their outputs, their rows, and drafts, which have the rows behind.
        masks: what follows a draft that does not conform stays 0.
    """
    num_bytes = masks.strides[0]
    for constraint, place, drafts in jobs:
        matcher, num_taken = constraint.matcher, 0
        for i in range(len(drafts) + 1):
            start = time.thread_time()
            matcher.unsafe_compute_mask_ptr(masks.ctypes.data + (place + i) * num_bytes, num_bytes)
            if time.thread_time() - start > forms.SLOW_SECONDS:
                constraint.form.is_slow = constraint.grammars.has_slow = True
            if i == len(drafts) or not matcher.try_consume_tokens(drafts[i : i + 1]):
                break
            num_taken += 1
        if num_taken:
            matcher.rollback(num_taken)


# ---- Sequences that wait for their masks ---------------------------------------------------------


def sit_out_slow_masks(scheduler: Scheduler, grammars: Grammars) -> None:
    """Have a scheduler leave out the sequences whose slow masks are not ready.

    It is made for the first request with a form, by when the scheduler is in use: so its method is wrapped.
    """
    schedule = scheduler.schedule

    def schedule_ready() -> ScheduledBatch:
        while True:
            late: dict[engine.Sequence, Future[Any]] = {}
            if grammars.has_slow:
                for seq in (*scheduler.running, *scheduler.waiting):
                    if (job := late_mask(seq)) is not None:
                        late[seq] = job
            if not late:
                return schedule()
            if len(late) < len(scheduler.running) + len(scheduler.waiting):
                batch = schedule_without(late)
                if batch.chunks:
                    return batch
            wait(late.values(), return_when=FIRST_COMPLETED)

    def schedule_without(late: Collection[engine.Sequence]) -> ScheduledBatch:
        limits = [(seq, seq.max_num_tokens) for seq in late]
        waiting = [seq for seq in scheduler.waiting if seq in late]
        scheduler.waiting = [seq for seq in scheduler.waiting if seq not in late]
        for seq in late:
            seq.max_num_tokens = 0  # running, it is taken to have nothing to compute
        try:
            return schedule()
        finally:
            scheduler.waiting = sorted(scheduler.waiting + waiting, key=engine.BY_ORDER)
            for seq, limit in limits:
                seq.max_num_tokens = limit

    scheduler.schedule = schedule_ready  # type: ignore[method-assign]


def late_mask(seq: engine.Sequence) -> Future[Any] | None:
    """Return what computes the mask that the sequence needs next, if that is slow and not ready."""
    for one in seq.processors:
        if isinstance(one, Constraint) and one.form.is_slow and seq.num_output_tokens:
            job = one.compute_ahead(seq.token_ids[seq.num_prompt_tokens :])
            return None if job.done() else job
    return None


class GrammarProposer:
    """Drafts that a grammar lets through: what it leaves no choice about, else another proposer's.

    Args:
        propose: the other, which also guesses for samples without a grammar.
        max_drafts: in a step.
    """

    def __init__(self, propose: Callable[[Any, int], list[int]], max_drafts: int) -> None:
        self.propose, self.max_drafts = propose, max_drafts

    def __call__(self, seq: Any, num_tokens: int) -> list[int]:
        """At most num_tokens guesses of what follows a sequence."""
        constraint = next((one for one in seq.processors if isinstance(one, Constraint)), None)
        if constraint is None:
            return self.propose(seq, num_tokens)
        form = constraint.form
        if (
            form.is_slow
            or not form.takes_back
            or not constraint.catch_up(seq.token_ids[seq.num_prompt_tokens :])
        ):
            return []
        forced: list[int] = constraint.matcher.compute_ff_tokens()
        drafts = forced[: min(num_tokens, self.max_drafts)] or self.propose(seq, num_tokens)
        return drafts[: constraint.matcher.validate_tokens(drafts)] if drafts else []
