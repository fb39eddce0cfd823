"""Log-probabilities of tokens that were drawn or given: tabulated on the device, read on the host.

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
    """Log-probabilities of some rows, on their way to the host."""

    rows: Sequence[int]  # which ones
    download: Download

    def read(self, token_ids: Sequence[int | None]) -> dict[int, dict[int, Logprob]]:
        """Row -> its entries, of the rows that have a token; token_ids are those of all rows."""
        table = self.download.read().numpy()
        floats, integers = table.view(np.float32), table.tolist()
        num_top = (table.shape[1] - 2) // 2
        entries = {}
        for row, numbers, values in zip(self.rows, integers, floats.tolist(), strict=True):
            token_id = token_ids[row]
            if token_id is not None:
                entries[row] = entry = {token_id: Logprob(values[0], numbers[1])}
                likeliest = zip(numbers[2 + num_top :], values[2 : 2 + num_top], strict=True)
                for rank, (other_id, value) in enumerate(likeliest, 1):
                    entry.setdefault(other_id, Logprob(value, rank))
        return entries


Transfer = Callable[[Tensor], Download]


def tabulate_logprobs(logits: Tensor, token_ids: Tensor, num_logprobs: int) -> Tensor:
    """The log-probability of each row's token, its rank, and the likeliest num_logprobs (-1: all) tokens.

    Shapes: logits (R, V), token_ids (R,) int64. One table, so that it is one transfer: (R, 2 + 2 k) int32,
    a row being the log-probability, the rank, k log-probabilities and their k token ids. Floats keep
    their bits.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(-1, keepdim=True) + 1
    top = logprobs.topk(num_logprobs if num_logprobs >= 0 else logprobs.shape[1])
    bits = torch.cat((chosen, ranks.int().view(torch.float32), top.values), dim=1)
    return torch.cat((bits.view(torch.int32), top.indices.int()), dim=1)


def report_samples(
    logits: Tensor, asked: Sequence[int | None], tokens: Tensor, transfer: Transfer, first: int = 0
) -> list[LogprobTable]:
    """Queue what rows (counted from `first`) ask for of the tokens drawn for them, from the raw logits.

    Shapes: logits (R, V), tokens (R,) int64. `asked` has each row's number of log-probabilities, or None.
    """
    by_number: dict[int, list[int]] = {}
    for i, num_logprobs in enumerate(asked):
        if num_logprobs is not None:
            by_number.setdefault(num_logprobs, []).append(i)
    tables = []
    for num_logprobs, rows in by_number.items():
        at = upload(np.array(rows), logits.device)
        # Where none could be drawn there is a -1, and the row of the table is not read.
        table = tabulate_logprobs(logits[at], tokens[at].clamp(min=0), num_logprobs)
        tables.append(LogprobTable([first + i for i in rows], transfer(table)))
    return tables


class PromptReport(NamedTuple):
    """Log-probabilities of a prompt's tokens, on their way to the host."""

    seq_id: int
    first: int  # position of the first of the tokens
    token_ids: list[int]
    tables: list[LogprobTable]

    def read(self) -> tuple[int, "Entries"]:
        """The first one's position, and the entries from there on."""
        return self.first, list(read_tables(self.tables, self.token_ids).values())


LOGPROB_ROWS = 256  # prompt rows turned into logits at a time: a row is as wide as the vocabulary


def report_prompts(
    chunks: Iterable[Any],
    hidden: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    transfer: Transfer,
) -> list[PromptReport]:
    """Queue what a step's chunks predict of the prompt tokens after them, for the sequences that ask for it.

    Args:
        chunks: the engine's.
        hidden: (T, E), the chunks' rows one after the other.
        compute_logits: (R, E) to (R, V).
        transfer: begins to copy a tensor to the host.
    """
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


Entries = list[dict[int, Logprob]]  # of tokens in their order: the token itself, and the likeliest


class Logprobs(NamedTuple):
    """What a step's sequences asked for, by seq_id."""

    of_samples: dict[int, Entries]  # of each draw
    of_prompts: dict[int, Any]  # as `PromptReport.read` gives it; of a model that pools, a vector


class Reports(NamedTuple):
    """All log-probabilities of a step, on their way to the host."""

    of_samples: list[LogprobTable]
    of_prompts: list[Any]  # each a `PromptReport`, or what an extension reports instead

    def read(self, sampled_seqs: Sequence[Any], token_ids: Sequence[int | None]) -> Logprobs:
        """Wait for them; sampled_seqs are the engine's sequences that token_ids were drawn for."""
        of_samples: dict[int, Entries] = {}
        for row, entry in read_tables(self.of_samples, token_ids).items():
            of_samples.setdefault(sampled_seqs[row].seq_id, []).append(entry)
        return Logprobs(of_samples, {report.seq_id: report.read() for report in self.of_prompts})


def read_tables(
    tables: Sequence[LogprobTable], token_ids: Sequence[int | None]
) -> dict[int, dict[int, Logprob]]:
    """Row -> the entries that were queued for it; token_ids are those of all rows."""
    return {row: entry for table in tables for row, entry in table.read(token_ids).items()}
