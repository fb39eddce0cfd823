"""The requests that a scheduler is studied with: when they arrive, how long they are, and what they share."""

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from nanoengine.sampling_params import check_integer, check_number, check_token_ids


class Arrival(NamedTuple):
    """Describes a request by its time and lengths. Of its content, only what prompts share matters."""

    arrival_time: float  # seconds from the start
    num_prompt_tokens: int
    num_output_tokens: int
    prefix: str | None = None  # prompts with the same name begin with the same tokens
    num_prefix_tokens: int = 0  # number of prompt tokens in the prefix
    hash_ids: tuple[int, ...] = ()  # then the prompt consists of blocks; equal ids stand for equal tokens
    hash_block_size: int = 512  # number of tokens in such a block, as in Mooncake's traces
    priority: int = 0  # lower runs first, under the policy `priority`
    ttft_deadline: float | None = None  # seconds from the arrival, for the policy `deadline`
    session: str | None = None  # requests of a session run one after another
    pause: float = 0.0  # seconds between the end of the session's last answer and this request

    def check(self) -> None:
        """Raise ValueError or TypeError if the request is invalid."""
        for name in ("num_prompt_tokens", "num_output_tokens", "hash_block_size"):
            check_integer(name, getattr(self, name), 1)
        check_integer("priority", self.priority, -(2**63))
        for name in ("arrival_time", "pause", "ttft_deadline"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, 0, 1e12)
        check_token_ids("hash_ids", self.hash_ids)
        most = 0 if self.prefix is None else self.num_prompt_tokens
        check_integer("num_prefix_tokens", self.num_prefix_tokens, 0, most)

    def parts(self, own: Any) -> list[tuple[Any, int]]:
        """Return the names of the prompt's parts, and their lengths. `own` is the name of its own part."""
        parts, num_left = [], self.num_prompt_tokens
        blocks = [(one, self.hash_block_size) for one in self.hash_ids]
        for name, size in ((self.prefix, self.num_prefix_tokens), *blocks, (own, num_left)):
            if size := min(size, num_left):
                parts.append((name, size))
                num_left -= size
        return parts


Lengths = Callable[[random.Random], int]  # draws a number of tokens


def parse_lengths(text: str) -> Lengths:
    """Parse a fixed length N, LOW-HIGH for a uniform distribution, or MEDIAN~SIGMA for a long tail.

    The last is log-normal, cut off at three sigmas: two thirds of "100~1" are from 37 to 272, none over 2009.

    >>> parse_lengths("40")(random.Random(0)), parse_lengths("16-64")(random.Random(0))
    (40, 40)
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+)|~(\d*\.?\d+))?", text)
    if match is None or int(match[1]) < 1:
        raise ValueError(f"a length must be N, LOW-HIGH or MEDIAN~SIGMA, at least 1, got {text!r}")
    low, high = int(match[1]), int(match[2] or match[1])
    if match[3] is not None:
        sigma = float(match[3])
        return lambda rng: max(1, round(low * np.exp(sigma * min(3.0, rng.gauss()))))
    if high < low:
        raise ValueError(f"in LOW-HIGH, LOW must be at most HIGH, got {text!r}")
    return lambda rng: rng.randint(low, high)


def generate_arrivals(
    num_requests: int,
    rate: float,
    prompt: Lengths,
    output: Lengths,
    *,
    burstiness: float = 1.0,
    num_prefixes: int = 0,
    num_prefix_tokens: int = 0,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yield requests at random times, `rate` per second on average. Equal seeds give equal requests.

    `burstiness` is the shape of the gamma distribution of the gaps, as in vLLM's `bench serve`: 1 is
    a Poisson process, less gives bursts. `prompt` draws the length of a prompt after its shared prefix.
    """
    rng, now = random.Random(seed), 0.0
    for _ in range(num_requests):
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        prefix = str(rng.randrange(num_prefixes)) if num_prefixes else None
        shared = num_prefix_tokens if num_prefixes else 0
        yield Arrival(now, shared + prompt(rng), output(rng), prefix, shared)


def agent_sessions(num: int, rate: float, length_factor: float = 1.0, seed: int = 0) -> Iterator[Arrival]:
    """Yield the turns of agents' conversations, of which `rate` per second begin on average.

    A turn's prompt is the last turn's prompt, its answer, and the result of the tool that it called. A median
    session has 43 turns, 142,000 prompt tokens, of which 96 % are the turn before, and 444 output tokens: a
    first prompt of about 920 tokens, and 113 more in each turn.
    """
    first, result, output, turns = map(parse_lengths, ("920~0.3", "85~0.7", "9~0.55", "43~0.5"))
    rng, now = random.Random(seed), 0.0
    for number in range(num):
        now += rng.expovariate(rate)
        num_tokens, name = round(length_factor * first(rng)) or 1, f"session {number}"
        for turn in range(turns(rng)):
            pause = rng.lognormvariate(0, 1) if turn else 0.0  # a median of one second
            num_output_tokens = max(1, round(length_factor * output(rng)))
            given = now, num_tokens, num_output_tokens, name, num_tokens
            yield Arrival(*given, session=name, pause=pause)
            num_tokens += num_output_tokens + round(length_factor * result(rng))


def read_arrivals(path: str) -> list[Arrival]:
    """Read requests, or a trace of Mooncake's, from a JSONL file, and sort them by time."""
    arrivals = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                given = {**json.loads(line)}
                if "timestamp" in given:
                    names = ("num_prompt_tokens", "input_length"), ("num_output_tokens", "output_length")
                    given |= {ours: given.pop(theirs, None) for ours, theirs in names}
                    given["arrival_time"] = given.pop("timestamp") / 1000
                arrival = Arrival(**given | {"hash_ids": tuple(given.get("hash_ids", ()))})
                arrival.check()
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            arrivals.append(arrival)
    return sorted(arrivals, key=lambda arrival: arrival.arrival_time)
