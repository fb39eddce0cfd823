"""Edits logits before sampling: biases, penalties and banned tokens. Also forces tokens, and explains bans.

Shape letters: R rows, P rows with penalties, V vocabulary.
"""

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoengine.backends.device import upload

# ---- Penalties -----------------------------------------------------------------------------------

IN_PROMPT, LARGEST_COUNT = -0x8000, 0x7FFF  # the sign bit of a count, and its other bits
MAX_ENTRIES = 1 << 20  # tokens penalized at a time, to limit memory


class TokenCounts:
    """Counts the tokens of running sequences on the device, because the last one may be pending.

    Each step adds one token per sequence. All of a sequence's tokens are uploaded when it is first seen, and
    whenever its counts no longer match its tokens, for example after a failed step.

    A slot takes 2 bytes per token of the vocabulary and 4 bytes per token of max_model_len. For 256 slots, a
    vocabulary of 152k tokens and a max_model_len of 40k, that is 120 MB.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.shape = max_num_seqs, max_model_len
        # (slots, V) int16: occurrences in the output, and the IN_PROMPT bit
        self.counts: Tensor | None = None
        self.token_ids: Tensor  # (slots, max_model_len) int32: prompt and output; later entries are unused
        self.num_counted = np.zeros(max_num_seqs, np.int64)  # tokens counted in each slot; 0: recount
        self.owners: list[Any] = [lambda: None] * max_num_seqs  # weak references to sequences
        self.slots: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # sequence -> slot

    def place(self, seqs: Sequence[Any]) -> list[int]:
        """Return each sequence's slot. A new sequence takes a slot whose owner ended or is not running."""
        if new := [seq for seq in dict.fromkeys(seqs) if seq not in self.slots]:
            taken = {self.slots.get(seq) for seq in seqs}
            free = [slot for slot in range(len(self.owners)) if slot not in taken]
            free.sort(key=lambda slot: bool((owner := self.owners[slot]()) and owner.block_table))
            for seq, slot in zip(new, free, strict=False):
                if (owner := self.owners[slot]()) is not None:
                    del self.slots[owner]
                self.owners[slot], self.slots[seq] = weakref.ref(seq), slot
                self.num_counted[slot] = 0
        return [self.slots[seq] for seq in seqs]

    def forget(self, seq: Any) -> None:
        """Recount a sequence's tokens in the next step, because some of them have changed."""
        if seq in self.slots:
            self.num_counted[self.slots[seq]] = 0

    def upload(self, row: Any, slot: int) -> None:
        """Count a row's tokens that are not counted yet, up to the last one, which may be pending."""
        assert self.counts is not None
        start, num_prompt_tokens, counts = self.num_counted[slot], row.num_prompt_tokens, self.counts[slot]
        self.num_counted[slot] = 0  # in case of an error
        if start == 0 or start >= row.position:
            start = 0
            counts.zero_()
        known = np.array(row.token_ids[start : max(row.position - 1, num_prompt_tokens)], np.int64)
        made, numbers = np.unique(known[max(0, num_prompt_tokens - start) :], return_counts=True)
        token_ids = upload(known, counts.device)
        self.token_ids[slot, start : start + len(known)] = token_ids
        counts.index_fill_(0, token_ids[: max(0, num_prompt_tokens - start)], IN_PROMPT)
        _add(counts, (upload(made, counts.device),), upload(numbers, counts.device))


def _add(counts: Tensor, at: tuple[Tensor, ...], numbers: Tensor) -> None:
    """Add numbers to the counts at these distinct places. Counts stop at LARGEST_COUNT."""
    before = counts[at].int()
    counts[at] = (before + torch.minimum(numbers, LARGEST_COUNT - (before & LARGEST_COUNT))).short()


class Penalties:
    """Penalizes rows in consecutive steps that sample the same sequences.

    After a sequence's first row come its rows for draft tokens. `first` is the index of the first of these
    rows in the step.
    """

    def __init__(self, rows: Sequence[Any], counts: TokenCounts, first: int) -> None:
        found = [i for i, row in enumerate(rows) if row.params.penalizes]
        found.sort(key=lambda i: -rows[i].position)  # rows of similar length are edited together
        self.rows, self.counts, places = [rows[i] for i in found], counts, np.array(found)
        seqs = [row.seq for row in self.rows]
        self.slots = np.arange(len(found)) if seqs[0] is None else np.array(counts.place(seqs))
        depths = np.array([row.depth for row in self.rows])
        self.known = np.flatnonzero(depths == 0)  # the rows whose last token is not a draft
        # The other rows also count drafts: the last tokens of the sequence's rows from depth 1 to their own.
        nth = np.arange(1, 1 + depths.max())
        drafts = np.where(nth > depths[:, None], -1, (first + places - depths)[:, None] + nth)
        names = "repetition_penalty", "presence_penalty", "frequency_penalty"
        values = np.array([[getattr(row.params, name) for name in names] for row in self.rows])
        self.arrays = np.stack((places, first + places, self.slots)), self.known, drafts, values
        self.on_device: list[Tensor] = []

    def apply(self, logits: Tensor, last: Tensor) -> None:
        """Count the last token of each row of the step, and edit the logits, (R, V) float32, in place."""
        counts, device = self.counts, logits.device
        if counts.counts is None:
            size, max_model_len = counts.shape
            counts.counts = torch.zeros(size, logits.shape[1], dtype=torch.int16, device=device)
            counts.token_ids = torch.zeros(size, max_model_len, dtype=torch.int32, device=device)
        self.on_device = self.on_device or [upload(array, device) for array in self.arrays]
        (places, in_step, slots), known, drafts, values = self.on_device

        positions = np.array([row.position for row in self.rows])
        is_output = np.array([row.position > row.num_prompt_tokens for row in self.rows])
        mine, ends = self.slots[self.known], positions[self.known]
        for i in self.known[(counts.num_counted[mine] != ends - 1) | ~is_output[self.known]]:
            counts.upload(self.rows[i], self.slots[i])
        counts.num_counted[mine] = 0  # in case of an error
        at, numbers = upload(np.stack((positions - 1, is_output)), device)
        counts.token_ids[slots, at] = last[in_step].int()
        _add(counts.counts, (slots[known], last[in_step[known]]), numbers[known])
        counts.num_counted[mine] = ends

        drafted, start = torch.where(drafts < 0, -1, last[drafts]), 0
        while start < len(positions):
            part = slice(start, start + max(1, MAX_ENTRIES // int(positions[start:].max())))
            slot, place = slots[part].unsqueeze(1), places[part].unsqueeze(1)
            # A token that occurs several times gets the same result each time.
            token_ids = counts.token_ids[:, : positions[part].max()][slots[part]].long()
            found, edited = counts.counts[slot, token_ids].int(), logits[place, token_ids]
            times = found & LARGEST_COUNT
            for draft in drafted[part].unsqueeze(2).unbind(1):
                times += token_ids == draft
            repetition, presence, frequency = values[part].unsqueeze(1).unbind(2)
            repetition = repetition.to(edited.dtype)
            repeated = torch.where(edited > 0, edited / repetition, edited * repetition)
            edited = torch.where((found < 0) | (times > 0), repeated, edited)
            edited -= ((times > 0) * presence + times * frequency).to(edited.dtype)
            logits[place, token_ids] = edited
            start = part.stop


# ---- All edits -----------------------------------------------------------------------------------

IdsOfRow = tuple[int, NDArray[np.int64]]  # a row and token ids


class RequestEdits:
    """Holds a request's biases and bans as arrays. They are made once, and all its samples share them."""

    def __init__(self, row: Any) -> None:
        bias, allowed = row.params.logit_bias or {}, row.params.allowed_token_ids
        self.source = row.stop_ids, row.bad_words
        self.biased = np.fromiter(bias, np.int64, len(bias))
        self.biases = np.fromiter(bias.values(), np.float32, len(bias))
        self.allowed = None if allowed is None else np.array(allowed, np.int64)
        self.stop_ids = np.fromiter(row.stop_ids, np.int64, len(row.stop_ids))
        last: dict[tuple[int, ...], list[int]] = {}
        for *beginning, token_id in row.bad_words:
            last.setdefault((*beginning,), []).append(token_id)
        self.last = {beginning: np.array(ids, np.int64) for beginning, ids in last.items()}  # of bad words
        self.lengths = {len(beginning) for beginning in last}

    def bans(self, row: Any) -> Iterator[NDArray[np.int64]]:
        """Yield the tokens that are banned at the row's position."""
        if row.position - row.num_prompt_tokens < row.params.min_tokens:
            yield self.stop_ids
        for length in self.lengths:
            start = row.position - length
            if start >= row.num_prompt_tokens:
                last = self.last.get(tuple(row.token_ids[start : row.position]))
                if last is not None:
                    yield last


def edits_of(row: Any) -> RequestEdits:
    """Return the edits of a row's request."""
    edits: RequestEdits | None = row.params.edits
    if edits is None or edits.source != (row.stop_ids, row.bad_words):
        row.params.edits = edits = RequestEdits(row)
    return edits


class BatchEdits:
    """Collects the edits of all rows that sample the same sequences, so that each kind is one operation."""

    def __init__(self, rows: Sequence[Any], edited: Sequence[int], device: torch.device) -> None:
        self.of_rows = [(i, edits_of(rows[i])) for i in edited]
        biased = [(i, edits) for i, edits in self.of_rows if len(edits.biased)]
        self.biased = _index([(i, edits.biased) for i, edits in biased], device)
        biases = [edits.biases for _, edits in biased] or [np.zeros(0, np.float32)]
        self.biases = upload(np.concatenate(biases), device)
        allowed = [(i, edits.allowed) for i, edits in self.of_rows if edits.allowed is not None]
        self.allowed = _index(allowed, device)
        self.restricted = upload(np.array([i for i, _ in allowed], np.int64), device)


def edit_logits(logits: Tensor, rows: Sequence[Any], settings: Any) -> None:
    """Apply the biases, penalties and bans of `SamplingRow`s in place. Only affected entries are touched."""
    if settings.edits is None:
        settings.edits = BatchEdits(rows, settings.edited, logits.device)
    edits: BatchEdits = settings.edits
    if edits.biased is not None:
        logits[edits.biased] += edits.biases
    if settings.penalizes:
        if settings.counts is None:  # rows without sequences
            settings.counts = TokenCounts(len(rows), max(row.position for row in rows))
            last = [row.token_ids[row.position - 1] if row.position else 0 for row in rows]
            settings.last = upload(np.array(last), logits.device)
        if settings.penalties is None:
            settings.penalties = Penalties(rows, settings.counts, settings.first)
        settings.penalties.apply(logits, settings.last)
    if edits.allowed is not None:
        kept = logits[edits.allowed]
        logits.index_fill_(0, edits.restricted, -math.inf)
        logits[edits.allowed] = kept
    bans = _index([(i, ids) for i, one in edits.of_rows for ids in one.bans(rows[i])], logits.device)
    if bans is not None:
        logits[bans] = logits.new_full((), -math.inf)  # a Python number would be copied synchronously


def emptied_by(seq: Any, vocab_size: int) -> str | None:
    """Return which settings ban every token that may come next in a sequence. None: they leave a token."""
    params, output_ids, may_end = seq.params, seq.token_ids[seq.num_prompt_tokens :], True
    left, where = set(range(vocab_size)), "may come next"
    for one in seq.processors:
        if one.is_mask:
            left, may_end = one.allowed(output_ids)
            where = "structured_outputs allow next"
    left |= seq.stop_ids if may_end else set()
    start = len(output_ids) + 1
    ended = (word for word in seq.bad_words if [*word[:-1]] == output_ids[max(0, start - len(word)) :])
    bans = {
        "allowed_token_ids": left.difference(params.allowed_token_ids or left),
        "bad_words": {word[-1] for word in ended} & left,
        "min_tokens": seq.stop_ids & left if may_end and len(output_ids) < params.min_tokens else set(),
        "stop_token_ids": set() if may_end else seq.stop_ids & left,
    }
    if not left or left.difference(*bans.values()):
        functions = [one for one in seq.processors if not one.is_mask]
        return "the logits are NaN or infinite, or logits_processors ban every token" if functions else None
    names = [name for name, ids in bans.items() if ids == left] or [name for name, ids in bans.items() if ids]
    return f"{' and '.join(names)} ban{'' if names[1:] else 's'} every token that {where}"


def force_tokens(
    logits: Tensor, rows: Sequence[Any], forced: Sequence[int], tokens: Tensor, reported: list[Tensor]
) -> None:
    """Replace sampled tokens, (R,), by those of `forced_token_ids`, in place, and report their own logits.

    Biases, bans and grammars do not apply to them. -1 marks a row of NaN or infinite logits: see draw_tokens.
    """
    places = [(i, rows[i].position - rows[i].num_prompt_tokens) for i in forced]
    ids = {i: given[n] for i, n in places if n < len(given := rows[i].params.forced_token_ids)}
    if ids:
        at, token_ids = upload(np.array([*ids.items()]).T, logits.device)
        tokens[at] = torch.where(logits[at].amax(-1).isfinite(), token_ids, -1)
        if reported[0] is not logits:
            reported[0][at] = logits[at].float()


def _index(entries: Sequence[IdsOfRow], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Return entries as an index of a matrix, or None if there are none."""
    if not entries:
        return None
    rows = np.repeat([row for row, _ in entries], [len(ids) for _, ids in entries])
    return upload(rows, device), upload(np.concatenate([ids for _, ids in entries]), device)
