"""Pooling: turn prompts into embeddings or classification scores instead of text.

Prompts are chunked and batched as usual. The result is made from the hidden states: that of the last token
("LAST"), that of the first ("CLS"), or the mean of all ("MEAN"), summed up over chunks. A token is still
sampled from the output. It is discarded, but ends the sequence.

The hidden state of the last token depends on earlier tokens only through K and V, which the prefix cache may
have. "MEAN" needs every hidden state, and "CLS" needs that of the first token, so neither uses prefix hits.
`LLM` and `AsyncLLM` have the functions at the end as methods. contrib/pooling_model.py reads the checkpoint's
settings.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nanoengine.async_llm import AsyncLLM
from nanoengine.backends.device import Download
from nanoengine.compat import accepts, without_unserved
from nanoengine.config import EngineConfig
from nanoengine.contrib.pooling_model import Pooling
from nanoengine.engine import Chunk
from nanoengine.engine import Sequence as Sample
from nanoengine.extensions.chats import render_chats
from nanoengine.llm import LLM
from nanoengine.models.checkpoint import Checkpoint
from nanoengine.outputs import RequestOutput
from nanoengine.requests import CheckedRequest, Prompt, RequestChecker, split_prompts
from nanoengine.sampling_params import SamplingParams, check_bool, check_integer

TASKS = {"embed": "embeds", "classify": "classifies"}

# ---- Requests and their outputs ------------------------------------------------------------------


@accepts()
@dataclass(slots=True, kw_only=True)
class PoolingParams:
    """Holds the parameters of a pooling request.

    Raises:
        ValueError, TypeError: a parameter is out of its range; the message names it.
    """

    task: str | None = None  # "embed" or "classify"; None: the model's task
    dimensions: int | None = None  # length of an embedding; None: all dimensions
    # Whether to normalize an embedding, or turn scores into probabilities. None: as the checkpoint says.
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None  # keep only that many last tokens; -1: as many as fit

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
    """Holds the result of `encode` for a prompt."""

    data: Tensor  # (E,), or (labels,) from a classifier; float32


@dataclass(slots=True)
class EmbeddingOutput:
    """Holds the result of `embed` for a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The length of the embedding."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """Holds the result of `classify` for a prompt."""

    probs: list[float]  # in the order of the labels

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """Holds the result of `score` for two texts."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput:
    """Holds the output of a pooling request, for a prompt or a pair of texts."""

    request_id: str
    outputs: Any  # one of the above
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput):
    """Holds an EmbeddingOutput in `outputs`."""


class ClassificationRequestOutput(PoolingRequestOutput):
    """Holds a ClassificationOutput in `outputs`."""


class ScoringRequestOutput(PoolingRequestOutput):
    """Holds a ScoringOutput in `outputs`."""


# ---- In the engine -------------------------------------------------------------------------------


class Pooled(NamedTuple):
    """Names a sequence's row in the pooled tensor of a step, which is being copied to the host."""

    seq_id: int
    row: int
    download: Download

    def read(self) -> Tensor:
        """Wait for the copy, and return the row in float32."""
        return self.download.read()[self.row]


class Pooler:
    """Pools hidden states with the method that the checkpoint specifies.

    Raises:
        ValueError: the engine has a setting that pooling does not support.
    """

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        assert checkpoint.pooling is not None
        if config.tensor_parallel_size != 1:
            raise ValueError(
                f"a pooling model needs tensor_parallel_size=1, got {config.tensor_parallel_size}"
            )
        for name in ("speculative_config", "logits_processors"):
            if getattr(config, name):
                raise ValueError(f"{name} does not work with a pooling model, which generates no text")
        self.pooling: Pooling = checkpoint.pooling
        self.task = "classify" if self.pooling.labels else "embed"
        self.hidden_size: int = checkpoint.hf_config.get_text_config().hidden_size
        # For partly computed sequences: the sum of their rows ("MEAN"), or their first row ("CLS").
        self.parts: WeakKeyDictionary[Sample, Tensor] = WeakKeyDictionary()

    def params_of(self, given: Any, num_prompts: int, task: str | None) -> list[PoolingParams]:
        """Return one PoolingParams per prompt, from one for all prompts or one each.

        Raises:
            ValueError: the model does not support `task`, the task of the call.
        """
        if task not in (None, self.task):
            raise ValueError(f"this model {TASKS[self.task]} its prompts; it cannot {task}")
        one = PoolingParams() if given is None else given
        return list(one) if isinstance(one, list | tuple) else [one] * num_prompts

    def sampling_params(self, params: Any) -> SamplingParams:
        """Return the SamplingParams with which the engine runs a pooling request.

        Raises:
            ValueError, TypeError: params are not PoolingParams, or the model does not support them.
        """
        if isinstance(params, SamplingParams):
            raise ValueError(f'this model {TASKS[self.task]} its prompts; set runner="generate" for text')
        if not isinstance(params, PoolingParams):
            raise TypeError(f"pooling_params must be PoolingParams, got {params!r}")
        params.__post_init__()  # the fields may have changed since
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
            # Prompt log-probabilities disable prefix hits and compute the hidden states of all rows.
            prompt_logprobs=None if self.pooling.kind == "LAST" else 0,
        )

    def report(
        self,
        chunks: Iterable[Chunk],
        hidden: Tensor,
        compute_logits: Callable[[Tensor], Tensor],
        transfer: Callable[[Tensor], Download],
    ) -> list[Pooled]:
        """Pool the prompts that a step completes, and start copying the results. See `ModelRunner.report`.

        Args:
            chunks: the chunks of the step.
            hidden: (T, E), the hidden states of all chunks in order.
            compute_logits: maps (R, E) to (R, labels), or returns its argument if there is no classifier.
            transfer: starts copying a tensor to the host.
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
        """Add a sequence's rows from `start` on. Return its pooled row so far, (E,); for a mean, the sum."""
        if self.pooling.kind == "LAST":
            return rows[-1]
        is_mean = self.pooling.kind == "MEAN"
        if start == 0:  # also after a preemption
            self.parts[seq] = rows.float().sum(0) if is_mean else rows[0].clone()
        elif is_mean:
            self.parts[seq] += rows.float().sum(0)
        return self.parts[seq]

    # -- for users

    def output(
        self, done: RequestOutput, params: PoolingParams, kind: str = "encode"
    ) -> PoolingRequestOutput:
        """Return the output of a finished request, of the type that the method named `kind` returns.

        Raises:
            RuntimeError: the request was aborted or failed.
        """
        completion = done.outputs[0]
        if done.pooled is None or completion.finish_reason in ("abort", "error"):
            reason = f"{completion.finish_reason}: {completion.stop_reason}"
            raise RuntimeError(f"request {done.request_id} has no output ({reason})")
        data = self.activate(done.pooled, params)
        common = done.prompt_token_ids, done.num_cached_tokens
        if kind == "embed":
            return EmbeddingRequestOutput(str(done.request_id), EmbeddingOutput(data.tolist()), *common)
        if kind == "classify":
            outputs = ClassificationOutput(data.tolist())
            return ClassificationRequestOutput(str(done.request_id), outputs, *common)
        return PoolingRequestOutput(str(done.request_id), PoolingOutput(data), *common)

    def activate(self, data: Tensor, params: PoolingParams) -> Tensor:
        """Return a pooled vector truncated and normalized, or scores as probabilities, as params say."""
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
        """Return the prompts that score pairs of texts. data_1 is one text, or one for each text of data_2.

        For a classifier, a chat template renders each pair as messages of a "query" and a "document".

        Raises:
            ValueError, TypeError: the data are not texts or do not pair, or the model has several labels.
        """
        texts = []
        for name, data in (("data_1", data_1), ("data_2", data_2)):
            data = [data] if isinstance(data, str) else data
            if not isinstance(data, list | tuple) or not all(isinstance(text, str) for text in data):
                raise TypeError(f"{name} must be a text or a list of texts, got {data!r:.99}")
            if not data:
                raise ValueError(f"{name} must contain at least one text")
            texts.append(list(data))
        firsts, seconds = texts
        if len(firsts) not in (1, len(seconds)):
            raise ValueError(
                f"data_1 must be one text, or as many as data_2: got {len(firsts)} for {len(seconds)}"
            )
        if not self.pooling.labels:
            return Scores(firsts + seconds, len(firsts))
        if len(self.pooling.labels) != 1:
            raise ValueError(
                f"score needs a classifier with one label, this one has {len(self.pooling.labels)}"
            )
        pairs = zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True)
        if chat_template is None:
            return Scores([{"prompt_token_ids": checker.encode(one, pair=two)} for one, two in pairs], 0)
        chats = [
            [{"role": "query", "content": one}, {"role": "document", "content": two}] for one, two in pairs
        ]
        tokenizer = checker.checkpoint.tokenizer
        return Scores(render_chats(chats, tokenizer, checker.encode, chat_template=chat_template), 0)


class Scores(NamedTuple):
    """Holds pairs of texts to score, either by a classifier that reads both or by their embeddings."""

    prompts: list[Any]  # for the engine: the pairs, or all first texts followed by all second texts
    num_firsts: int  # number of first texts; 0: prompts are pairs

    def read(self, outputs: Sequence[PoolingRequestOutput]) -> list[ScoringRequestOutput]:
        """Return the scores, from the outputs of `encode` for the prompts."""
        if not self.num_firsts:
            return [_scored(float(pair.outputs.data[0]), pair) for pair in outputs]
        firsts, seconds = outputs[: self.num_firsts], outputs[self.num_firsts :]
        firsts = list(firsts) * (len(seconds) // len(firsts))
        return [
            _scored(float(torch.cosine_similarity(one.outputs.data, two.outputs.data, dim=0)), one, two)
            for one, two in zip(firsts, seconds, strict=True)
        ]


def _scored(score: float, *parts: PoolingRequestOutput) -> ScoringRequestOutput:
    token_ids = [token_id for part in parts for token_id in part.prompt_token_ids]
    num_cached_tokens = sum(part.num_cached_tokens for part in parts)
    return ScoringRequestOutput(parts[-1].request_id, ScoringOutput(score), token_ids, num_cached_tokens)


# ---- Methods of LLM and AsyncLLM -----------------------------------------------------------------


def encode(
    llm: LLM,
    prompts: Prompt | Sequence[Prompt],
    pooling_params: Any = None,
    *,
    use_tqdm: bool = True,
    pooling_task: str | None = None,
    **unserved: Any,
) -> list[PoolingRequestOutput]:
    """Run a pooling model on prompts. Returns one `PoolingRequestOutput` per prompt.

    Its `outputs.data` is an embedding or a classifier's probabilities, a float32 tensor. Pass one
    `PoolingParams` for all prompts or one per prompt; None is the checkpoint's settings. `pooling_task` is
    "embed" or "classify"; None is the one that the model supports. Invalid arguments raise as in `generate`.
    """
    settings = {"use_tqdm": use_tqdm, "pooling_params": pooling_params, **unserved}
    return _pool(llm, "encode", prompts, pooling_task, **settings)


def embed(llm: LLM, prompts: Prompt | Sequence[Prompt], **settings: Any) -> list[PoolingRequestOutput]:
    """Embed prompts, with `use_tqdm` and `pooling_params` as for `encode`.

    In an `EmbeddingRequestOutput`, `outputs.embedding` is a list.
    """
    return _pool(llm, "embed", prompts, "embed", **settings)


def classify(llm: LLM, prompts: Prompt | Sequence[Prompt], **settings: Any) -> list[PoolingRequestOutput]:
    """Classify prompts, with `use_tqdm` and `pooling_params` as for `encode`.

    In a `ClassificationRequestOutput`, `outputs.probs` is a list.
    """
    return _pool(llm, "classify", prompts, "classify", **settings)


def score(
    llm: LLM,
    data_1: str | Sequence[str],
    data_2: str | Sequence[str],
    *,
    chat_template: str | None = None,
    **settings: Any,
) -> list[ScoringRequestOutput]:
    """Score pairs of texts: one text with each of several, or two lists pairwise.

    A classifier with one label reads both texts of a pair, joined by the tokenizer, or rendered by
    `chat_template` as messages of a "query" and a "document". For an embedding model the score is the cosine
    similarity. It is a float, `outputs.score` of a `ScoringRequestOutput` per pair.
    """
    checker = llm.llm_engine.checker
    scores = _pooler(llm, "score").plan_scores(data_1, data_2, checker, chat_template)
    return scores.read(_pool(llm, "score", scores.prompts, **settings))


async def encode_async(
    llm: AsyncLLM, prompt: Prompt | CheckedRequest, pooling_params: Any, request_id: str, **settings: Any
) -> AsyncGenerator[PoolingRequestOutput]:
    """Yield one `PoolingRequestOutput`, the result of a pooling model for a prompt.

    Cancellation and errors work as in `generate`.
    """
    pooler = _pooler(llm, "encode")
    async with aclosing(llm.generate(prompt, pooling_params, request_id, **settings)) as outputs:
        async for output in outputs:
            yield pooler.output(output, pooling_params)


def _pooler(llm: LLM | AsyncLLM, call: str) -> Pooler:
    pooler: Pooler | None = llm.llm_engine.pooler
    if pooler is None:
        raise ValueError(f'{call} needs a model that pools; make the engine with runner="pooling"')
    return pooler


def _pool(
    llm: LLM,
    call: str,
    prompts: Any,
    task: str | None = None,
    /,
    *,
    use_tqdm: bool = True,
    pooling_params: Any = None,
    **unserved: Any,
) -> list[PoolingRequestOutput]:
    """Validate a call to a pooling model, and run it."""
    without_unserved(call, unserved, ("prompts", "use_tqdm", "pooling_params"))
    pooler, prompt_list = _pooler(llm, call), split_prompts(prompts)
    params_list = pooler.params_of(pooling_params, len(prompt_list), task)
    if (num := len(params_list)) != len(prompt_list):
        raise ValueError(f"pooling_params must be one per prompt: got {num} for {len(prompt_list)}")
    checked = list(map(llm.llm_engine.check, prompt_list, params_list))
    outputs = llm._run(checked, use_tqdm)
    return [pooler.output(*pair, call) for pair in zip(outputs, params_list, strict=True)]
