"""Decides how many draft tokens a draft model computes in a step: as many as save time.

The seconds of passes are measured at startup. They leave out some of the host's work, and each model evicts
the other's weights from the processor's cache. So the times of real steps correct them, separately for steps
of 1, 2 to 3, 4 to 7, ... chunks:

    without drafts    plain * target.of(rows)
    drafts add        extra * (target.of(rows + drafts) - target.of(rows) + draft.of(sequences) per depth)

`plain` and `extra` are averages over measured steps. The first steps have no drafts. While drafts pay, a few
steps without them now and then keep `plain` up to date. The first of these does not count, because it takes
longer than the others. While drafts do not pay, trials of a few steps keep `extra` and the odds up to date.
Trials may cost at most TRIAL_SHARE of the time.
"""

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from nanoengine.engine import ModelRunner
from nanoengine.sampling_params import SamplingParams
from nanoengine.startup import trial_batch
from nanoengine.steps import Stopwatch

LOWEST_ODDS = 0.4  # a draft that is less likely to be right is not computed
FAR = 1 << 20  # more rows than any pass has
FIRST_EXTRA = 1.5  # the costs of drafts before a step with drafts was measured, per estimated second
SMALLEST = 0.1  # of both averages: a smaller one would take long to grow again
GAIN = 1.1  # drafts have to save this many times as many seconds as they cost
LASTING_GAIN = 2.0  # and all drafts of a sequence this many times as many as it takes to catch up
# With more than two sequences, drafts have to make a step this many times as fast per token. They make
# sequences end at different times, and the remaining small batches are slower per token.
BATCH_GAIN = 1.25
FEW, WINDOW = 4, 8  # a measured step moves an average by 1/8, and by 1/5 at first
NUM_PLAIN = 16  # steps without drafts before drafts are considered again
NUM_DRAFTED, NUM_CHECKED = 64, 4  # steps with drafts, and then without, while drafts pay
TRIAL_STEPS, TRIAL_DEPTH = 4, 2
TRIAL_SHARE = 0.01  # of the time
FORESEEN = 256  # how many more tokens a sequence is assumed to sample at most


class Costs(NamedTuple):
    """Holds how many seconds a pass takes for different numbers of decodes, measured at startup."""

    num_rows: list[int]  # ascending
    seconds: list[float]

    @classmethod
    def measure(cls, runner: ModelRunner, largest: int) -> "Costs":
        """Time passes of 1, 2, 4, ... decodes, until one takes twice as long as the first."""
        costs = cls([0], [0.0])
        while (last := costs.num_rows[-1]) < largest and costs.seconds[-1] <= 2 * costs.seconds[:2][-1]:
            batch, times = trial_batch([1] * max(1, 2 * last), SamplingParams(), [0]), [time.perf_counter()]
            for _ in range(3):
                runner.collect(runner.launch(batch))
                times.append(time.perf_counter())
            costs.num_rows.append(batch.num_tokens)
            costs.seconds.append(min(after - before for before, after in pairwise(times)))
        (*_, x, last), (*_, y, longest) = costs  # larger passes are extrapolated from the last two
        costs.num_rows.append(FAR)
        costs.seconds.append(longest + (FAR - last) * max(0.0, longest - y) / (last - x))
        runner.stopwatch = Stopwatch()  # these passes do not count as steps
        return costs

    def of(self, num_rows: int) -> float:
        """Return the seconds of a pass, interpolated between the two nearest measurements."""
        xs, ys = self
        i = min(max(bisect_left(xs, num_rows), 1), len(xs) - 1)
        return ys[i - 1] + (ys[i] - ys[i - 1]) * max(0, num_rows - xs[i - 1]) / (xs[i] - xs[i - 1])


class Offer(NamedTuple):
    """Describes a sequence that may have drafts."""

    odds: float  # how likely a draft is to be right if the drafts before it are right
    limit: int  # the most drafts that it may have
    num_behind: int = 0  # known tokens that the draft model has yet to compute, beside the last two
    num_left: int = FORESEEN  # the most tokens that it may still sample


@dataclass(slots=True)
class Average:
    """Averages what was measured, relative to what was estimated. A single outlier counts at most double."""

    value: float
    num: int = FEW  # measurements, at most WINDOW. The estimate counts as one or a few

    def add(self, seconds: float, estimate: float) -> None:
        """Add a measurement."""
        self.num = min(self.num + 1, WINDOW)
        found = min(max(seconds / estimate, self.value / 2, SMALLEST), 2 * self.value)
        self.value += (found - self.value) / self.num


@dataclass(slots=True)
class Pace:
    """Holds what was learned from steps with similarly many chunks."""

    # Measured seconds per estimated second: of a step without drafts, and of what drafts add to a step.
    plain: Average = field(default_factory=lambda: Average(1.0, 1))
    extra: Average = field(default_factory=lambda: Average(FIRST_EXTRA))
    num_drafted: int = 0  # steps with drafts since the last one without
    num_rests: int = field(default_factory=lambda: NUM_CHECKED)  # the next steps have no drafts
    num_trials: int = 0  # the next steps have drafts although they may not pay
    credit: float = 0.0  # how many seconds trials may cost


class Planner:
    """Chooses the number of drafts for each step, and learns from the time that the step took.

    Args:
        target, draft: the costs of the target model and of the draft model.
        clock: returns seconds.
    """

    def __init__(self, target: Costs, draft: Costs, clock: Callable[[], float] = time.perf_counter) -> None:
        self.target, self.draft, self.clock = target, draft, clock
        self.paces: dict[int, Pace] = defaultdict(Pace)  # by the bit length of the number of chunks

    def begin(self) -> None:
        """Begin a step."""
        self.started, self.num_rows = self.clock(), 0

    def rests(self, num_chunks: int, num_rows: int) -> bool:
        """Return whether a step has no drafts, which was decided in an earlier step.

        Args:
            num_chunks: the chunks of the step, before drafts.
            num_rows: their rows. Only a step that consists of decodes is measured.
        """
        self.pace, self.num_rows = self.paces[num_chunks.bit_length()], num_rows * (num_rows == num_chunks)
        self.is_trial, self.estimate, self.is_steady = False, 0.0, True
        self.pace.num_rests -= (rests := self.pace.num_rests > 0)
        return rests

    def choose(self, offers: list[Offer], num_rows: int, budget: int) -> list[int]:
        """Return how many drafts to compute for each offer. Call it after `rests` returned False.

        Args:
            offers: the sequences that may have drafts.
            num_rows: rows that the target model computes in any case.
            budget: the most drafts for all sequences together.
        """
        pace, sizes = self.pace, self.worthwhile(offers, num_rows, budget)
        if any(sizes) and not pace.num_trials:
            if pace.num_drafted >= NUM_DRAFTED:
                sizes, pace.num_rests = [0] * len(offers), NUM_CHECKED - 1
        else:
            tried = [min(TRIAL_DEPTH, offer.limit) for offer in offers]
            price = TRIAL_STEPS * pace.extra.value * self.cost(tried, num_rows) + sum(map(self.delay, offers))
            if not pace.num_trials and 0 < price <= pace.credit:
                pace.num_trials, pace.credit = TRIAL_STEPS, price
            self.is_trial = bool(pace.num_trials and self.num_rows and sum(tried) <= budget)
            if self.is_trial:
                pace.num_trials -= 1
                sizes = tried
            elif price:
                pace.num_rests = NUM_PLAIN
        self.estimate = self.cost(sizes, num_rows)
        self.is_steady = not any(offer.num_behind for offer, n in zip(offers, sizes, strict=True) if n)
        return sizes

    def cost(self, sizes: list[int], num_rows: int) -> float:
        """Return the estimated seconds that drafts add to a step, not corrected."""
        passes = [sum(size > depth for size in sizes) for depth in range(max(sizes, default=0))]
        return (
            self.target.of(num_rows + sum(sizes)) - self.target.of(num_rows) + sum(map(self.draft.of, passes))
        )

    def delay(self, offer: Offer) -> float:
        """Return the estimated seconds to compute what the draft model has yet to compute, not corrected."""
        return offer.num_behind * self.draft.of(FAR) / FAR

    def worthwhile(self, offers: list[Offer], num_rows: int, budget: int) -> list[int]:
        """Return how many drafts save time, for each offer.

        One more draft per sequence is computed if the tokens that it is expected to add would take longer
        without it. Then a sequence that needs more time to catch up than its drafts save has none.
        """
        extra, left = self.pace.extra.value, budget
        seconds = plain = self.pace.plain.value * self.target.of(len(offers))
        sizes, tokens = [0] * len(offers), float(len(offers))
        for depth in range(1, max((offer.limit for offer in offers), default=0) + 1):
            deeper = [i for i, offer in enumerate(offers) if sizes[i] == depth - 1 < offer.limit]
            deeper = [i for i in deeper if offers[i].odds ** depth >= LOWEST_ODDS][:left]
            gain = sum(offers[i].odds ** depth for i in deeper)
            cost = self.target.of(num_rows + len(deeper)) - self.target.of(num_rows)
            cost = extra * (cost + self.draft.of(len(deeper)))
            if not deeper or gain * seconds < GAIN * cost * tokens:
                break
            for i in deeper:
                sizes[i] = depth
            num_rows, left = num_rows + len(deeper), left - len(deeper)
            tokens, seconds = tokens + gain, seconds + cost
        if not offers or not seconds:
            return sizes
        if len(offers) > 2 and plain / len(offers) < BATCH_GAIN * seconds / tokens:
            return [0] * len(offers)
        saved = plain / len(offers) - seconds / tokens  # per token
        fitting = [
            offer.limit if LASTING_GAIN * self.delay(offer) <= saved * min(offer.num_left, FORESEEN) else 0
            for offer in offers
        ]
        if all(fits or not size for fits, size in zip(fitting, sizes, strict=True)):
            return sizes
        fewer = [offer._replace(limit=limit) for offer, limit in zip(offers, fitting, strict=True)]
        return self.worthwhile(fewer, num_rows - sum(sizes), budget)

    def end(self) -> None:
        """End a step, and learn from its time."""
        if not self.num_rows or not (plain := self.target.of(self.num_rows)):
            return
        pace, elapsed = self.pace, self.clock() - self.started
        more = elapsed - pace.plain.value * plain
        if not self.estimate:
            if not pace.num_drafted:
                pace.plain.add(elapsed, plain)
            pace.credit += TRIAL_SHARE * elapsed
            pace.num_drafted = 0
        else:
            pace.num_drafted += 1
            pace.credit -= self.is_trial * max(0.0, more)
            if self.is_steady:
                pace.extra.add(more, self.estimate)
