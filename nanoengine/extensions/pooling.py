"""Pooling: prompts become vectors or a classifier's scores instead of text.

A prompt takes one pass, in chunks where it is long, beside others. The hidden states that a runner would make
logits of are what is wanted, so a model that pools has no head, or a classifier's in its place. A token is
drawn from that all the same, and thrown away: it ends the sequence. Prompts of 6 and 3 tokens, 4 in a step:

    step    chunks            "LAST" takes    "MEAN" takes
    1       [0, 4) of a       -               the sum of a's 4 rows
    2       [4, 6) of a       a's row 5       that and a's 2 rows, divided by 6
            [0, 2) of b       -               the sum of b's 2 rows
    3       [2, 3) of b       b's row 2       that and b's row 2, divided by 3

The last token's hidden state needs only K and V of those before it, which the prefix cache may have. The mean
needs every hidden state, and "CLS" the first token's, so that they take no hits.

`LLM` and `AsyncLLM` have the calls, `models/pooling.py` reads what the checkpoint says. Names are vLLM's.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nanoengine.backends.device import Download
from nanoengine.compat import accepts
from nanoengine.config import EngineConfig
from nanoengine.engine import Chunk
from nanoengine.engine import Sequence as Sample
from nanoengine.models.checkpoint import Checkpoint
from nanoengine.models.pooling import Pooling
from nanoengine.outputs import RequestOutput
from nanoengine.requests import RequestChecker, render_chats
from nanoengine.sampling_params import SamplingParams, check_bool, check_integer

TASKS = {"embed": "embeds", "classify": "classifies"}

# ---- What is asked for, and what a user gets -----------------------------------------------------


@accepts()
@dataclass(slots=True, kw_only=True)
class PoolingParams:
    """What a request wants of a model that pools.

    Raises:
        ValueError, TypeError: a parameter is out of its range; the message names it.
    """

    task: str | None = None  # "embed" or "classify"; None: whichever the model does
    dimensions: int | None = None  # of an embedding; None: all
    # Whether an embedding is normalised, or scores made probabilities; None: as the checkpoint says
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None  # only the last so many; -1: as many as fit

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.task not in (None, *TASKS):
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {self.task!r}")
        if self.dimensions is not None:
            check_integer("dimensions", self.dimensions, 1)
        if self.use_activation is not None:
            check_bool("use_activation", self.use_activation)


@dataclass(slots=True)
class PoolingOutput:
    """What `encode` makes of a prompt."""

    data: Tensor  # (E,) or, of a classifier, (labels,); float32


@dataclass(slots=True)
class EmbeddingOutput:
    """What `embed` makes of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers there are."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """What `classify` makes of a prompt."""

    probs: list[float]  # in the order of the labels

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """What `score` makes of two texts."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput:
    """What came of a prompt, or of a pair of texts."""

    request_id: str
    outputs: Any  # one of the above
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput):
    """Whose outputs are an EmbeddingOutput."""


class ClassificationRequestOutput(PoolingRequestOutput):
    """Whose outputs are a ClassificationOutput."""


class ScoringRequestOutput(PoolingRequestOutput):
    """Whose outputs are a ScoringOutput."""


# ---- In the engine -------------------------------------------------------------------------------


class Pooled(NamedTuple):
    """A row of what a step pooled, on its way to the host."""

    seq_id: int
    row: int
    download: Download

    def read(self) -> Tensor:
        """Wait for it; float32."""
        return self.download.read()[self.row]


class Pooler:
    """Pools hidden states as a checkpoint says.

    Raises:
        ValueError: a setting of the engine that does not go with it.
    """

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        assert checkpoint.pooling is not None
        if config.tensor_parallel_size != 1:
            raise ValueError("a model that pools needs tensor_parallel_size=1")
        for name in ("speculative_config", "logits_processors"):
            if getattr(config, name):
                raise ValueError(f"{name} does not go with a model that pools: it generates no text")
        self.pooling: Pooling = checkpoint.pooling
        self.task = "classify" if self.pooling.labels else "embed"
        self.hidden_size: int = checkpoint.hf_config.get_text_config().hidden_size
        # Of sequences that are computed in part: the sum of their rows, or their first one.
        self.parts: WeakKeyDictionary[Sample, Tensor] = WeakKeyDictionary()

    def params_of(self, given: Any, num_prompts: int, task: str | None) -> list[PoolingParams]:
        """A call's parameters, one for all prompts or one each, as one each; `task` is the call's.

        Raises:
            ValueError: the model does something else.
        """
        if task not in (None, self.task):
            raise ValueError(f"this model {TASKS[self.task]}: it cannot {task}")
        one = PoolingParams() if given is None else given
        return list(one) if isinstance(one, list | tuple) else [one] * num_prompts

    def sampling_params(self, params: Any) -> SamplingParams:
        """A request's parameters as the engine serves them.

        Raises:
            ValueError, TypeError: they are no PoolingParams, or ask for what the model does not do.
        """
        if isinstance(params, SamplingParams):
            raise ValueError(f'this model {TASKS[self.task]}, and generates no text; see runner="generate"')
        if not isinstance(params, PoolingParams):
            raise TypeError(f"pooling_params must be PoolingParams, got {params!r}")
        params.__post_init__()  # it may have been changed since
        if params.task not in (None, self.task):
            raise ValueError(
                f"task must be {self.task!r}: this model {TASKS[self.task]}, got {params.task!r}"
            )
        known = (*self.pooling.dimensions, self.hidden_size)
        if params.dimensions not in (None, *known):
            raise ValueError(
                f"dimensions must be among the checkpoint's, {known!r:.60}, got {params.dimensions}"
            )
        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            detokenize=False,
            truncate_prompt_tokens=params.truncate_prompt_tokens,
            # No hits, and all rows computed to the end, as for a prompt's log-probabilities.
            prompt_logprobs=None if self.pooling.kind == "LAST" else 0,
        )

    def report(
        self,
        chunks: Iterable[Chunk],
        hidden: Tensor,
        compute_logits: Callable[[Tensor], Tensor],
        transfer: Callable[[Tensor], Download],
    ) -> list[Pooled]:
        """Queue what a step's chunks complete; `ModelRunner.report`.

        Args:
            chunks: of the step.
            hidden: (T, E), their rows one after the other.
            compute_logits: (R, E) to (R, labels), or as it is.
            transfer: begins to copy a tensor to the host.
        """
        row, seq_ids, pooled = 0, [], []
        for seq, start, end, samples, _ in chunks:
            rows = hidden[row : row + end - start]
            row += end - start
            part = self._add(seq, start, rows)
            if samples:
                seq_ids.append(seq.seq_id)
                pooled.append(part / end if self.pooling.kind == "MEAN" else part)
        if not pooled:
            return []
        download = transfer(compute_logits(torch.stack(pooled)).float())
        return [Pooled(seq_id, i, download) for i, seq_id in enumerate(seq_ids)]

    def _add(self, seq: Sample, start: int, rows: Tensor) -> Tensor:
        """What there is of a sequence with the rows from `start` on, (E,); for a mean, the sum."""
        if self.pooling.kind == "LAST":
            return rows[-1]
        is_mean = self.pooling.kind == "MEAN"
        if start == 0:  # a preempted sequence comes here again
            self.parts[seq] = rows.float().sum(0) if is_mean else rows[0].clone()
        elif is_mean:
            self.parts[seq] += rows.float().sum(0)
        return self.parts[seq]

    # -- for users

    def output(
        self, done: RequestOutput, params: PoolingParams, kind: str = "encode"
    ) -> PoolingRequestOutput:
        """What a call returns of a request that is done; `kind` is the call's name.

        Raises:
            RuntimeError: it was aborted, or could not be computed.
        """
        completion = done.outputs[0]
        if done.pooled is None or completion.finish_reason in ("abort", "error"):
            reason = f"{completion.finish_reason}: {completion.stop_reason}"
            raise RuntimeError(f"request {done.request_id} gave nothing ({reason})")
        data = self.activate(done.pooled, params)
        make: Any = PoolingRequestOutput
        outputs: Any = PoolingOutput(data)
        if kind == "embed":
            make, outputs = EmbeddingRequestOutput, EmbeddingOutput(data.tolist())
        elif kind == "classify":
            make, outputs = ClassificationRequestOutput, ClassificationOutput(data.tolist())
        result: PoolingRequestOutput = make(
            str(done.request_id), outputs, done.prompt_token_ids, done.num_cached_tokens
        )
        return result

    def activate(self, data: Tensor, params: PoolingParams) -> Tensor:
        """A pooled vector, cut and normalised; or scores as probabilities."""
        activation = self.pooling.activation
        if params.use_activation is not None:
            used = activation if activation != "none" or self.pooling.labels else "normalize"
            activation = used if params.use_activation else "none"
        data = data[: params.dimensions]
        if activation == "normalize":
            return torch.nn.functional.normalize(data, dim=-1)
        if activation == "softmax":
            return data.softmax(-1)
        return data.sigmoid() if activation == "sigmoid" else data.clone()

    def plan_scores(
        self, data_1: Any, data_2: Any, checker: RequestChecker, chat_template: str | None = None
    ) -> "Scores":
        """How to score pairs of texts; of a pair, the template writes messages of a "query" and a "document".

        Raises:
            ValueError, TypeError: they are no texts or do not pair, or the model has several labels.
        """
        texts = []
        for name, data in (("data_1", data_1), ("data_2", data_2)):
            data = [data] if isinstance(data, str) else data
            if not isinstance(data, list | tuple) or not all(isinstance(text, str) for text in data):
                raise TypeError(f"{name} must be a text or a list of texts, got {data!r:.99}")
            if not data:
                raise ValueError(f"{name} must hold at least one text")
            texts.append(list(data))
        firsts, seconds = texts
        if len(firsts) not in (1, len(seconds)):
            raise ValueError(
                f"data_1 must be one text, or as many as data_2: got {len(firsts)} for {len(seconds)}"
            )
        if not self.pooling.labels:
            return Scores(firsts + seconds, len(firsts))
        if len(self.pooling.labels) != 1:
            raise ValueError(f"score needs a classifier with one label: this has {len(self.pooling.labels)}")
        pairs = zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True)
        if chat_template is None:
            return Scores([{"prompt_token_ids": checker.encode(one, pair=two)} for one, two in pairs], 0)
        chats = [
            [{"role": "query", "content": one}, {"role": "document", "content": two}] for one, two in pairs
        ]
        tokenizer = checker.checkpoint.tokenizer
        return Scores(render_chats(chats, tokenizer, checker.encode, chat_template=chat_template), 0)


class Scores(NamedTuple):
    """Pairs of texts to be scored: by a classifier that reads both, or by their embeddings."""

    prompts: list[Any]  # for the engine: the pairs; or the first texts and then the second ones
    num_firsts: int  # 0: pairs

    def read(self, outputs: Sequence[PoolingRequestOutput]) -> list[ScoringRequestOutput]:
        """The scores, of what `encode` made of the prompts."""
        if not self.num_firsts:
            return [
                ScoringRequestOutput(
                    one.request_id,
                    ScoringOutput(float(one.outputs.data[0])),
                    one.prompt_token_ids,
                    one.num_cached_tokens,
                )
                for one in outputs
            ]
        firsts, seconds = outputs[: self.num_firsts], outputs[self.num_firsts :]
        firsts = list(firsts) * (len(seconds) // len(firsts))
        return [
            ScoringRequestOutput(
                two.request_id,
                ScoringOutput(float(torch.cosine_similarity(one.outputs.data, two.outputs.data, dim=0))),
                one.prompt_token_ids + two.prompt_token_ids,
                one.num_cached_tokens + two.num_cached_tokens,
            )
            for one, two in zip(firsts, seconds, strict=True)
        ]
