"""`LLM`: what most users hold. It generates, chats and streams over an `LLMEngine`."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from nanoengine.compat import refuse_unserved
from nanoengine.config import EngineConfig
from nanoengine.engine import Scheduler
from nanoengine.llm_engine import LLMEngine
from nanoengine.metrics import Metric
from nanoengine.optional import ContribMethod
from nanoengine.outputs import Inbox, RequestOutput
from nanoengine.requests import CheckedRequest, Prompt, render_chats, split_prompts
from nanoengine.sampling_params import RequestOutputKind, SamplingParams
from nanoengine.steps import uninterrupted


class LLM:
    """A model, ready to answer. Arguments are `EngineConfig`'s; names are vLLM's where it has them.

    Not for several threads at once: `AsyncLLM` is.

    >>> with LLM("Qwen/Qwen3-0.6B") as llm:  # doctest: +SKIP
    ...     print(llm.generate("Hello", SamplingParams(max_tokens=8))[0].outputs[0].text)

    Raises:
        TypeError: an argument that does not exist.
        ValueError: a setting or checkpoint that cannot be served; nothing is kept.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        self.llm_engine = LLMEngine(EngineConfig(model=model, **settings))
        self._numbers = itertools.count()  # request ids of its own calls; a user's are strings
        self._inboxes: dict[Any, Inbox] = {}  # by request_id: that of the call that made the request
        self._inbox = Inbox()  # for `step`: what came of requests that the user added

    # -- for most users

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        **unserved: Any,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs come in their order.

        Args:
            prompts: a string, a list of token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`,
                or a list of these.
            sampling_params: one for all or one per prompt; None is `get_default_sampling_params()`.
            use_tqdm: show progress.
            priority: one per prompt, with `scheduling_policy="priority"`; lower runs first.
            unserved: vLLM's other arguments, accepted if they ask for nothing: `compat.py` has the rule.

        Raises:
            ValueError, TypeError: a prompt or parameter cannot be served; then none was queued. After
                any other exception this call's requests are aborted and the engine stays usable.
        """
        refuse_unserved(self.generate, unserved)
        kind = RequestOutputKind.FINAL_ONLY
        return self._run(self._check_all(prompts, sampling_params, priority, kind), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete prompts and yield each one's new text and tokens as they come, finished ones marked.

        Takes what `generate` takes and raises what it raises, at the call. `request_id` is the
        prompt's index. Leaving the loop early, or closing the iterator, aborts what is left.
        """
        return self._stream(self._check_all(prompts, sampling_params, priority, RequestOutputKind.DELTA))

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        **unserved: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation (a list of `{"role": ..., "content": ...}`), or several at once.

        A content is a string, or a list of text parts. The template is shown `tools`.

        Raises:
            ValueError: the tokenizer has no chat template, or a content is not text; and as `generate`.
        """
        refuse_unserved(self.chat, unserved)
        settings: dict[str, Any] = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        prompts = self.render_chat(messages, **settings)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def render_chat(self, messages: Sequence[Any], **template_settings: Any) -> list[dict[str, Any]]:
        """Conversations as prompts for `generate`, `stream` or `add_request`, by the chat template."""
        settings = {"add_generation_prompt": True, **template_settings}
        return render_chats(messages, self.get_tokenizer(), self.llm_engine.checker.encode, **settings)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Any = None,
        *,
        use_tqdm: bool = True,
        pooling_task: str | None = None,
        **unserved: Any,
    ) -> list[Any]:
        """What a model that pools makes of prompts, as tensors: embeddings, or a classifier's probabilities.

        Args:
            prompts: as `generate` takes them.
            pooling_params: `PoolingParams`, one for all or one per prompt; None: as the checkpoint says.
            use_tqdm: show progress.
            pooling_task: "embed" or "classify"; None: whichever the model does.
            unserved: as for `generate`.

        Returns:
            A `PoolingRequestOutput` per prompt, whose `outputs.data` is float32.

        Raises:
            ValueError, TypeError: the model does not do this, or a prompt or parameter cannot be served.
        """
        refuse_unserved(self.encode, unserved)
        return self._pool("encode", prompts, pooling_params, use_tqdm, pooling_task)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: Any = None,
        **unserved: Any,
    ) -> list[Any]:
        """Embed prompts; as `encode`, with `EmbeddingRequestOutput`s: `outputs.embedding` is a list."""
        refuse_unserved(self.embed, unserved)
        return self._pool("embed", prompts, pooling_params, use_tqdm, "embed")

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: Any = None,
        **unserved: Any,
    ) -> list[Any]:
        """Classify prompts; as `encode`, with `ClassificationRequestOutput`s: `outputs.probs` is a list."""
        refuse_unserved(self.classify, unserved)
        return self._pool("classify", prompts, pooling_params, use_tqdm, "classify")

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: bool = True,
        pooling_params: Any = None,
        chat_template: str | None = None,
        **unserved: Any,
    ) -> list[Any]:
        """Score pairs of texts: one text with each of several, or each with its own.

        A classifier with one label reads both texts of a pair, as the tokenizer joins them, or by
        `chat_template` as messages of a "query" and a "document"; of an embedding model it is the cosine.

        Returns:
            A `ScoringRequestOutput` per pair, whose `outputs.score` is a float.
        """
        refuse_unserved(self.score, unserved)
        checker = self.llm_engine.checker
        scores = self._pooler("score").plan_scores(data_1, data_2, checker, chat_template)
        outputs = self._pool("score", scores.prompts, pooling_params, use_tqdm, None)
        return list(scores.read(outputs))

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config recommends; vLLM's defaults where it says nothing."""
        return self.llm_engine.checkpoint.default_sampling_params()

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer; None where the checkpoint has none."""
        return self.llm_engine.checkpoint.tokenizer

    # -- for those who drive the engine step by step

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, **settings: Any
    ) -> None:
        """As `LLMEngine.add_request`."""
        if isinstance(request_id, str) and request_id in self._inbox:  # finished, but not handed over
            raise ValueError(f"request_id {request_id!r} is in use")
        self.llm_engine.add_request(request_id, prompt, params, **settings)

    def step(self) -> list[RequestOutput]:
        """As `LLMEngine.step`, of the requests that were added: one output of each that has news.

        Streams that are open advance too.
        """
        self._step()
        return self._inbox.take(self._inbox)

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """As `LLMEngine.abort_request`."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._deliver(self.llm_engine.abort_request(ids))
        return self._inbox.take(ids)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to compute or to hand over."""
        return bool(self._inbox) or self.llm_engine.has_unfinished_requests()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; refused (False) while requests run."""
        return self.llm_engine.reset_prefix_cache()

    # For learners: methods in contrib/reload.py.
    update_weights = ContribMethod("reload")
    sleep = ContribMethod("reload")
    wake_up = ContribMethod("reload")
    is_sleeping = ContribMethod("reload")
    collective_rpc = ContribMethod("reload")

    def metrics(self) -> dict[str, int | float]:
        """As `LLMEngine.metrics`."""
        return self.llm_engine.metrics()

    def get_metrics(self) -> list[Metric]:
        """As `LLMEngine.get_metrics`."""
        return self.llm_engine.get_metrics()

    @property
    def scheduler(self) -> Scheduler:
        """The engine's, to look at."""
        return self.llm_engine.scheduler

    def close(self) -> None:
        """Abort what runs and release the memory; the object is of no use afterwards."""
        self._deliver(self.llm_engine.abort_request(list(self._inboxes)))  # streams end with "abort"
        self._inbox.clear()
        self.llm_engine.close()

    shutdown = close  # vLLM's name

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- how its own calls and the user's requests share the engine

    def _check_all(
        self, prompts: Any, sampling_params: Any, priority: Any, kind: RequestOutputKind
    ) -> list[CheckedRequest]:
        """Validate a whole call before anything of it is queued."""
        prompt_list = split_prompts(prompts)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params_list = [params] * len(prompt_list) if isinstance(params, SamplingParams) else params
        priorities = [0] * len(prompt_list) if priority is None else priority
        for name, values in (("sampling_params", params_list), ("priority", priorities)):
            if not isinstance(values, list | tuple):
                raise TypeError(f"{name} must be one for all prompts or a list, got {values!r}")
            if len(values) != len(prompt_list):
                raise ValueError(f"{name} must be one per prompt: got {len(values)} for {len(prompt_list)}")
        requests = zip(prompt_list, params_list, priorities, strict=True)
        checked = [self.llm_engine.check(*request) for request in requests]
        for one in checked:
            one.params.output_kind = kind  # of the request's own copy
        return checked

    def _pooler(self, call: str) -> Any:
        if self.llm_engine.pooler is None:
            raise ValueError(f'{call} needs a model that pools; make the engine with runner="pooling"')
        return self.llm_engine.pooler

    def _pool(self, call: str, prompts: Any, params: Any, use_tqdm: bool, task: str | None) -> list[Any]:
        """Check a call of a model that pools, and run it."""
        pooler = self._pooler(call)
        prompt_list = split_prompts(prompts)
        params_list = pooler.params_of(params, len(prompt_list), task)
        if len(params_list) != len(prompt_list):
            given, asked = len(params_list), len(prompt_list)
            raise ValueError(f"pooling_params must be one per prompt: got {given} for {asked}")
        checked = list(map(self.llm_engine.check, prompt_list, params_list))
        outputs = self._run(checked, use_tqdm)
        return [pooler.output(*pair, call) for pair in zip(outputs, params_list, strict=True)]

    def _run(self, checked: list[CheckedRequest], use_tqdm: bool) -> list[RequestOutput]:
        """Run a call's requests to their ends."""
        # A Ctrl-C between steps strikes here too, but never while requests are queued or aborted.
        with uninterrupted() as let_strike, self._submitted(checked) as (ids, inbox):
            self._run_until_finished(ids, inbox, use_tqdm, let_strike)
            return [replace(inbox[request_id], request_id=str(request_id)) for request_id in ids]

    @contextmanager
    def _submitted(self, checked: list[CheckedRequest]) -> Iterator[tuple[list[int], Inbox]]:
        """Queue requests; gives their ids and inbox. What is unfinished when the block ends is aborted."""
        ids, inbox = list(itertools.islice(self._numbers, len(checked))), Inbox()
        try:
            for request_id, one in zip(ids, checked, strict=True):
                self._inboxes[request_id] = inbox
                self.llm_engine.submit(request_id, one)
            yield ids, inbox
        finally:
            with uninterrupted():
                self.llm_engine.abort_request(ids)
                for request_id in ids:
                    self._inboxes.pop(request_id, None)

    @uninterrupted()
    def _step(self) -> None:
        self._deliver(self.llm_engine.step())

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self._inboxes.get(output.request_id, self._inbox).put(output)

    def _advance(self) -> None:
        """A step on behalf of requests that are unfinished."""
        if not self.llm_engine.has_unfinished_requests():
            raise RuntimeError("requests were aborted, or stepped by another thread: use AsyncLLM there")
        self._step()

    def _run_until_finished(
        self, ids: list[int], inbox: Inbox, use_tqdm: bool, let_strike: Callable[[], None]
    ) -> None:
        """Step until each of the requests has its output; others in the engine advance with them."""
        start, num_shown, num_prompt_tokens, num_output_tokens = time.monotonic(), 0, 0, 0
        with tqdm(total=len(ids), desc="Processed prompts", disable=not use_tqdm) as bar:
            while len(inbox) < len(ids):
                self._advance()
                let_strike()
                if len(inbox) == num_shown:
                    continue
                for output in itertools.islice(inbox.values(), num_shown, None):
                    num_prompt_tokens += len(output.prompt_token_ids)
                    num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                    elapsed = time.monotonic() - start
                    rates = f"{num_prompt_tokens / elapsed:.0f} prompt tokens/s, "
                    rates += f"{num_output_tokens / elapsed:.0f} output tokens/s"
                    bar.set_postfix_str(rates, refresh=False)
                    bar.update()
                num_shown = len(inbox)

    def _stream(self, checked: list[CheckedRequest]) -> Iterator[RequestOutput]:
        with self._submitted(checked) as (ids, inbox):
            left = set(ids)
            while left:
                if not inbox:
                    self._advance()
                for request_id in sorted(inbox):
                    output = inbox.pop(request_id)
                    if output.finished:
                        left.remove(request_id)
                    yield replace(output, request_id=str(request_id - ids[0]))
