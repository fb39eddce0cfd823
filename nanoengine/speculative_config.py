"""Defines `SpeculativeConfig`, the settings of speculative decoding, validated."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from nanoengine.sampling_params import accepts, check_integer


@accepts()
@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Holds the settings of speculative decoding. Names and defaults are vLLM's, but max_num_seqs is ours."""

    num_speculative_tokens: int  # limit on draft tokens per sequence and step
    # "ngram": draft what followed the last tokens at an earlier occurrence (prompt lookup). "draft_model",
    # the default if there is a model: draft what that model says
    method: str | None = None
    model: str | Path | None = None  # the draft model: hub id, directory or GGUF file; it has the same tokens
    revision: str | None = None  # of the draft model, like the two below. None: as in `EngineConfig`
    dtype: str | torch.dtype | None = None  # None: the dtype setting of the target model
    quantization: str | None = None
    # no drafts while more sequences run. None: 1 with a draft model, because drafts did not pay in larger
    # batches, and no limit for n-grams, which cost little
    max_num_seqs: int | None = None
    prompt_lookup_min: int | None = None  # shortest n-gram to look up; None: prompt_lookup_max, or 5
    prompt_lookup_max: int | None = None  # longest n-gram to look up; None: prompt_lookup_min, or 5

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.method not in (("ngram",) if self.model is None else ("draft_model", None)):
            wanted = '"ngram", or "draft_model" with a model' if self.model is None else '"draft_model"'
            raise ValueError(f'speculative_config["method"] must be {wanted}, got {self.method!r}')
        check_integer("num_speculative_tokens", self.num_speculative_tokens, 1)
        for name in ("max_num_seqs", "prompt_lookup_min", "prompt_lookup_max"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        low, high = self.lookup_lengths
        if low > high:
            raise ValueError(f"prompt_lookup_min must be at most prompt_lookup_max, got {low} and {high}")

    @property
    def max_drafting_seqs(self) -> int:
        """The number of running sequences above which there are no drafts."""
        return self.max_num_seqs or (sys.maxsize if self.model is None else 1)

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """The lengths of the shortest and the longest n-gram to look up."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        return low or high or 5, high or low or 5
