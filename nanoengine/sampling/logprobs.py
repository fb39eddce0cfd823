"""Computes log-probabilities of sampled and prompt tokens: tabulated on the device, read on the host.

Shape letters: R rows (tokens), V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoengine.backends.device import Download, upload
from nanoengine.outputs import Logprob


class LogprobTable(NamedTuple):
    """Holds the log-probabilities of some rows, while they are copied to the host."""

    rows: Sequence[int]  # indices of these rows
    download: Download

    def read(self, token_ids: Sequence[int | None]) -> dict[int, dict[int, Logprob]]:
        """Return row -> entries, for the rows that have a token. token_ids has one entry for every row."""
        table = self.download.read().numpy()
        floats, integers = table.view(np.float32), table.tolist()
        num_top = (table.shape[1] - 2) // 2
        entries = {}
        for row, numbers, values in zip(self.rows, integers, floats.tolist(), strict=True):
            token_id = token_ids[row]
            if token_id is not None:
                entries[row] = entry = {token_id: Logprob(values[0], numbers[1])}
                top = zip(numbers[2 + num_top :], values[2 : 2 + num_top], strict=True)
                for rank, (other_id, value) in enumerate(top, 1):
                    entry.setdefault(other_id, Logprob(value, rank))
        return entries


Transfer = Callable[[Tensor], Download]


def tabulate_logprobs(logits: Tensor, token_ids: Tensor, num_logprobs: int) -> Tensor:
    """Tabulate each row's token: its log-probability and rank, and the num_logprobs (-1: all) best tokens.

    Shapes: logits (R, V), token_ids (R,) int64. The result is a single table, so that one transfer is enough:
    (R, 2 + 2 k) int32. Each row holds the log-probability, the rank, the k highest log-probabilities and
    their k token ids. Floats are stored as their bits.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(-1, keepdim=True) + 1
    top = logprobs.topk(num_logprobs if num_logprobs >= 0 else logprobs.shape[1])
    bits = torch.cat((chosen, ranks.int().view(torch.float32), top.values), dim=1)
    return torch.cat((bits.view(torch.int32), top.indices.int()), dim=1)


def report_samples(
    logits: Tensor, requested: Sequence[int | None], tokens: Tensor, transfer: Transfer, first: int = 0
) -> list[LogprobTable]:
    """Queue log-probabilities of rows from `first` on: as many as `requested` for each, or None."""
    by_number: dict[int, list[int]] = {}
    for i, num_logprobs in enumerate(requested):
        if num_logprobs is not None:
            by_number.setdefault(num_logprobs, []).append(i)
    tables = []
    for num_logprobs, rows in by_number.items():
        at = upload(np.array(rows), logits.device)
        # -1 marks a row that could not be sampled. Its row in the table is never read.
        table = tabulate_logprobs(logits[at], tokens[at].clamp(min=0), num_logprobs)
        tables.append(LogprobTable([first + row for row in rows], transfer(table)))
    return tables


class PromptReport(NamedTuple):
    """Holds the log-probabilities of some of a prompt's tokens, while they are copied to the host."""

    seq_id: int
    first: int  # position of the first of the tokens
    token_ids: list[int]
    tables: list[LogprobTable]

    def read(self) -> tuple[int, "Entries"]:
        """Return the position of the first token, and the entries from there on."""
        return self.first, list(read_tables(self.tables, self.token_ids).values())


LOGPROB_ROWS = 256  # prompt rows to compute logits for at a time: each is as wide as the vocabulary


def report_prompts(
    chunks: Iterable[Any], hidden: Tensor, compute_logits: Callable[[Tensor], Tensor], transfer: Transfer
) -> list[PromptReport]:
    """Queue requested log-probabilities of the prompt tokens that a step's hidden states, (T, E), predict."""
    reports, row = [], 0
    for chunk in chunks:
        seq, start, end = chunk.seq, chunk.start, chunk.end
        # The last prompt token predicts the output.
        if seq.prompt_logprobs is not None and start < (last := min(end, seq.num_prompt_tokens - 1)):
            predicted, tables = seq.token_ids[start + 1 : last + 1], []
            device_ids = upload(np.array(predicted), hidden.device)
            for first in range(0, len(predicted), LOGPROB_ROWS):
                rows = range(len(predicted))[first : first + LOGPROB_ROWS]
                logits = compute_logits(hidden[row + rows.start : row + rows.stop])
                table = tabulate_logprobs(logits, device_ids[rows.start : rows.stop], seq.prompt_logprobs)
                tables.append(LogprobTable(rows, transfer(table)))
            reports.append(PromptReport(seq.seq_id, start + 1, predicted, tables))
        row += end - start
    return reports


Entries = list[dict[int, Logprob]]  # one per token, in order: the token itself, and the most probable ones


class Logprobs(NamedTuple):
    """Holds the log-probabilities that a step's sequences requested, by seq_id."""

    of_samples: dict[int, Entries]  # one entry per sampled token
    of_prompts: dict[int, tuple[int, Entries]]  # results of `PromptReport.read`


class Reports(NamedTuple):
    """Holds all log-probabilities of a step, while they are copied to the host."""

    of_samples: list[LogprobTable]
    of_prompts: list[PromptReport]

    def read(self, sampled_seqs: Sequence[Any], token_ids: Sequence[int | None]) -> Logprobs:
        """Wait for the copies and return the entries. token_ids has one token per entry of sampled_seqs."""
        of_samples: dict[int, Entries] = {}
        for row, entry in read_tables(self.of_samples, token_ids).items():
            of_samples.setdefault(sampled_seqs[row].seq_id, []).append(entry)
        return Logprobs(of_samples, {report.seq_id: report.read() for report in self.of_prompts})


def read_tables(
    tables: Sequence[LogprobTable], token_ids: Sequence[int | None]
) -> dict[int, dict[int, Logprob]]:
    """Return row -> entries, from all tables. token_ids has one entry for every row."""
    return {row: entry for table in tables for row, entry in table.read(token_ids).items()}
