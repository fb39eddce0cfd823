"""`LLMEngine` turns requests into sequences, and their tokens into outputs.

assembly.py makes its `EngineCore`, which it runs step by step. Three helpers are used throughout.
`uninterrupted` delays a Ctrl-C or a timeout to the end of a block, so that no state is left half changed.
`Owner` lets only one thread use the engine at a time. `Inbox` holds outputs that have not been returned yet.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from nanoengine.assembly import make_core, start_model
from nanoengine.backends.packing import describe_forms
from nanoengine.backends.threads import limit_threads
from nanoengine.config import EngineConfig
from nanoengine.detokenizer import Vocabulary
from nanoengine.engine import Collected, Sequence
from nanoengine.outputs import Inbox, RequestOutput, RequestStats
from nanoengine.requests import CheckedRequest, Prompt, Request, RequestChecker, random_seed
from nanoengine.sampling.sampler import UNDRAWN, why_no_token
from nanoengine.sampling_params import SamplingParams, refuse_unserved
from nanoengine.signals import uninterrupted
from nanoengine.thread_ownership import Owner
from nanoengine.timing import log

if TYPE_CHECKING:  # imported when metrics are read
    from nanoengine.metrics import Metric


class LLMEngine:
    """Queues requests and returns their outputs, one step at a time. Names are vLLM's.

    Only one thread may use it at a time: use `AsyncLLM` for several threads. `before_forward` is called just
    before each forward pass.

    Raises:
        ValueError: a setting or checkpoint is not supported. No memory stays allocated.
    """

    def __init__(self, config: EngineConfig, before_forward: Callable[[], object] = lambda: None) -> None:
        self.config, self._threads = config, limit_threads()
        self.started, self.draft_model = start_model(config, before_forward)
        self.core = make_core(self.started, self.draft_model)
        _, self.checkpoint, self.max_model_len = self.started.opened
        self.runner, self.scheduler = self.core.runner, self.core.scheduler
        blocks = self.scheduler.block_manager
        self.checker = RequestChecker(self.checkpoint, config, self.max_model_len, blocks)
        self.requests: dict[Any, Request] = {}  # unfinished, by request_id. Read it only
        self._request_of: dict[int, Request] = {}  # the same requests, by the seq_id of each sequence
        self._outputs = Inbox()  # the outputs that `step` returns: of requests added without an inbox
        self._vocabulary = Vocabulary(self.checkpoint.tokenizer)
        self._seq_ids = itertools.count()
        self.num_prompt_tokens = self.num_generation_tokens = 0
        self._stats = RequestStats(self.max_model_len)  # counts finished requests
        self._processors: list[Any] = []  # the engine's logits processors; a request may add its own
        if config.logits_processors:
            from nanoengine.extensions.logits_processors import find_functions

            self._processors = find_functions(config.logits_processors)
        self._reloader: Any = None  # set when weights are replaced
        self._is_closed, self._owner = False, Owner()
        self._tracer: Any = None
        if config.trace is not None:
            from nanoengine.extensions.trace import Tracer

            requests = self._request_of
            self._tracer = Tracer(
                self.scheduler,
                config.trace,
                model=config.model,
                request_of=lambda seq_id: str(requests[seq_id].request_id),
                tokenizer=self.checkpoint.tokenizer,
                seconds=self.runner.stopwatch.seconds,
            )
        self._rest()
        log.info(self.describe())

    # -- what users call

    def __reduce__(self) -> Any:
        """Raise TypeError: an engine's memory and threads belong to its process."""
        hint = "make one in the other process, or send requests to a server"
        raise TypeError(f"{type(self).__name__} cannot be pickled: {hint}")

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """Make an engine from a config, under vLLM's name."""
        return cls(engine_args)

    @property
    def model_config(self) -> SimpleNamespace:
        """The model's settings under vLLM's names, for scripts that read its length or its config.json."""
        return SimpleNamespace(
            model=str(self.config.model),
            max_model_len=self.max_model_len,
            dtype=self.started.loaded.dtype,
            hf_config=self.checkpoint.hf_config,
            trust_remote_code=self.config.trust_remote_code,
        )

    @uninterrupted()
    def check(self, prompt: Prompt, params: Any, priority: int = 0) -> CheckedRequest:
        """Validate a request without changing anything. Raises what `RequestChecker.check` raises."""
        self.check_ready()
        checked = self.checker.check(prompt, params, priority)
        return checked._replace(processors=tuple(self._processors_of(checked)))

    def check_ready(self) -> None:
        """Raise RuntimeError if the engine is closed, or if this process is a fork of its own."""
        if self._is_closed:
            raise RuntimeError("the engine is closed")
        self._owner.check_process()

    def _processors_of(self, checked: CheckedRequest) -> Iterator[Callable[[], Any]]:
        """Yield a factory per logits processor of a sample: the request's, the engine's, the grammar's."""
        params = checked.params
        if functions := [*(params.logits_processors or ()), *self._processors]:
            from nanoengine.extensions.logits_processors import FunctionProcessor

            yield from (partial(FunctionProcessor, one) for one in functions)
        if params.structured_outputs is not None:
            yield self._grammars.compile(params.structured_outputs)

    @cached_property
    def _grammars(self) -> Any:
        """The compiler of structured outputs, created when the first request needs it."""
        from nanoengine.extensions.structured.token_masks import Grammars

        grammars = Grammars(self.checkpoint.tokenizer, self.checkpoint.vocab_size)
        self.scheduler.schedule_only_if(grammars.is_ready)
        return grammars

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | CheckedRequest,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        inbox: Any = None,
        **unserved: Any,
    ) -> None:
        """Queue a request, given as a prompt or as the result of `check`. `step` computes it.

        The request keeps a copy of its parameters. `step` returns its outputs. If `inbox` is given, its
        method `put` receives them instead.

        Raises:
            ValueError, TypeError: the id is in use, or the request cannot be served.
            RuntimeError: the engine is closed, or another thread has unfinished requests.
        """
        refuse_unserved(self.add_request, unserved)
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {request_id!r}")
        if request_id in self.requests or request_id in self._outputs:
            raise ValueError(f"request_id {request_id!r} is already in use")
        if not isinstance(prompt, CheckedRequest):
            params = self.checkpoint.default_sampling_params() if params is None else params
            prompt = self.check(prompt, params, priority)
        self.submit(request_id, prompt, inbox)

    @uninterrupted()
    def submit(self, request_id: Any, checked: CheckedRequest, inbox: Any) -> None:
        """Queue a checked request. `add_request` documents `inbox`."""
        self._owner.claim()
        self.check_ready()  # the engine may have been closed since the check
        params = checked.params
        seqs = [
            Sequence(
                seq_id,
                checked.token_ids,
                params,
                priority=checked.priority,
                seed=random_seed(params, index, self.config.seed, seq_id),
                stop_ids=checked.stop_ids,
                bad_words=checked.bad_words,
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
                detokenizer=self._vocabulary.detokenizer(
                    checked.token_ids, params, checked.new_parser and checked.new_parser().content_of
                ),
                processors=tuple(make() for make in checked.processors),
            )
            for index, seq_id in enumerate(itertools.islice(self._seq_ids, params.n))
        ]
        inbox = self._outputs if inbox is None else inbox
        self.requests[request_id] = request = Request(request_id, checked, seqs, self._vocabulary, inbox)
        self._request_of |= {seq.seq_id: request for seq in seqs}
        for i, seq in enumerate(seqs):
            try:
                self.scheduler.add(seq)
            except BaseException:  # raised by the code of a policy: none of the request is queued
                for added in seqs[:i]:
                    self.scheduler.finish(added, "abort")
                self._unlist(request)
                raise
        self.num_prompt_tokens += len(checked.token_ids)

    def step(self) -> list[RequestOutput]:
        """Run one step, and return an output for each request that received a token or finished.

        With async scheduling, the tokens are those of the previous step, so the first call returns no output.

        Raises:
            Exception: the forward pass raised this exception. Every request keeps its tokens, stays queued,
                and is recomputed: call `step` again, or abort some requests. A sequence that was running in
                two failed steps without a new token in between finishes with "error".
        """
        self.advance()
        return self._take_outputs(self._outputs)

    def _take_outputs(self, request_ids: Iterable[Any]) -> list[RequestOutput]:
        """Take the outputs of these requests, or none of them if a signal's handler raises."""
        outputs: list[RequestOutput] = []
        try:
            with uninterrupted():
                outputs = self._outputs.take(request_ids)
            return outputs
        except BaseException:
            for output in outputs:
                self._outputs.put(output)
            raise

    @uninterrupted()  # a signal takes effect at the end, so that no output is lost
    def advance(self) -> None:
        """Run one step like `step`, and put the outputs into the inboxes of their requests."""
        self._owner.claim()
        try:
            collected = self.core.step()
            if collected is not None:
                self._take(collected)
            elif self.scheduler.is_ready is not None and not self.core.in_flight:
                from nanoengine.extensions.structured.token_masks import wait_for_mask

                wait_for_mask([*self.scheduler.running, *self.scheduler.waiting])
        except BaseException:
            self.core.recover()
            self._hand_over([request for request in self.requests.values() if request.has_news])
            raise
        finally:
            if self._tracer is not None:
                self._tracer.end_step()
        if not self.requests:
            self._rest()

    def abort_request(self, request_ids: Any) -> list[RequestOutput]:
        """Abort requests, given one id or several, and free their blocks. Unknown ids are ignored.

        Returns:
            The requests' last outputs, including everything that was not returned before. finish_reason is
            "abort" for samples that were unfinished.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._abort(ids)
        return self._take_outputs(ids)

    @uninterrupted()
    def _abort(self, ids: list[Any]) -> None:
        requests = [self.requests[i] for i in dict.fromkeys(ids) if i in self.requests]
        if requests:
            self._owner.claim()
        for request in requests:
            for sample in request.samples.values():
                if not sample.seq.is_finished:
                    self.scheduler.finish(sample.seq, "abort")
            self._forget(request)
            request.inbox.put(request.output())
        if requests and not self.requests:
            self._rest()

    def get_tokenizer(self) -> Any:
        """Return the transformers tokenizer, or None if the checkpoint has none."""
        return self.checkpoint.tokenizer

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has something to compute or to return."""
        return bool(self.requests or self._outputs)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Returns False and does nothing while requests are running."""
        return self.scheduler.block_manager.reset_prefix_cache()

    @uninterrupted()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all or some weights with tensors of the same names and shapes, and clear the prefix cache.

        Names are the checkpoint's. For models on transformers' code, they are those of transformers'
        parameters. All tensors are checked before the first is written.

        Raises:
            ValueError, TypeError: a tensor is unknown, has another shape or is not floating point, or the
                engine's weights cannot be replaced. Nothing was changed.
            RuntimeError: there are unfinished requests.
        """
        self.check_ready()
        if self.has_unfinished_requests():
            raise RuntimeError("there are unfinished requests: finish or abort them first")
        if self._reloader is None:
            from nanoengine.extensions.update_weights import Reloader

            self._reloader = Reloader(self.config, self.checkpoint, self.runner.model)
        self._reloader.update_weights(weights)
        self.reset_prefix_cache()

    def metrics(self) -> dict[str, int | float]:
        """Return counters since the start, and the state of the queues and the cache: see metrics.py."""
        from nanoengine.metrics import metrics

        return metrics(self)

    def get_metrics(self) -> list["Metric"]:
        """Return the metrics, and histograms of finished requests, in the form of vLLM's reader."""
        from nanoengine.metrics import get_metrics

        return get_metrics(self)

    def describe(self) -> str:
        """Describe the engine to the user: model code, attention backend, device, weights and cache."""
        config, started, runner = self.config, self.started, self.runner
        loaded, attention = started.loaded, runner.attention
        blocks: Any = self.scheduler.block_manager
        notes = f" ({'; '.join(attention.notes)})" if attention.notes else ""
        part = " (only its language model: no images)" if self.checkpoint.is_part else ""
        weights = describe_forms(runner.model, self.checkpoint.quant_method, config.quantization)
        weights += "" if config.lora is None else f" and the adapter {Path(config.lora).name}"
        kind = config.kv_cache_dtype.replace("auto", "")
        cache = f"{kind} KV cache of {started.num_blocks} blocks of {runner.block_size} tokens".lstrip()
        states = f"{started.num_state_slots} states of {loaded.state_bytes:,} bytes"
        windows = ""
        if any(spec.window and spec.window < self.max_model_len for spec in loaded.kv_specs):
            from nanoengine.extensions.sliding_windows import describe_windows

            windows = describe_windows([group.window for group in loaded.kv_groups])
        proposer = getattr(config.speculation, "model", None) or "ngram"
        drafts = f"up to {config.num_speculative_tokens} draft tokens ({proposer}), no async scheduling"
        remarks = [
            f"{str(loaded.dtype).removeprefix('torch.')}{weights} on {runner.device.device}",
            cache if loaded.kv_specs else "no KV cache",
            windows,
            states if started.num_state_slots else "",
            started.memory,
            self._threads,
            drafts if config.num_speculative_tokens else "",
            "" if config.kv_store is None else f"KV store {blocks.connector.store}",
        ]
        code = f"{self.checkpoint.architecture}{part} on {runner.model.code} code"
        kernels = f"{attention.backend.name} attention{notes}{runner.forward.remark}"
        return ", ".join(filter(None, [code, kernels, *remarks]))

    @uninterrupted()
    def close(self) -> None:
        """Abort all requests and release the memory. The engine cannot be used afterwards."""
        self._owner.claim()
        self._is_closed = True
        self.abort_request(list(self.requests))
        if self._tracer is not None:
            self._tracer.close()
        self._outputs.clear()
        if "_grammars" in vars(self):
            self._grammars.close()
        self.core.close()
        if self.draft_model is not None:
            self.draft_model.runner.close()
        self._rest()

    shutdown = close  # vLLM's name

    # -- helpers

    def _rest(self) -> None:
        """Let any thread make the next request. Called when all requests have finished."""
        self.runner.device.rest()
        self._owner.release()

    def _take(self, collected: Collected) -> None:
        """Record a step's results in their requests, and make the outputs that are due."""
        stopwatch = self.runner.stopwatch
        stopwatch.start()
        now = time.monotonic()
        of_samples, of_prompts = collected.logprobs
        requests: dict[Any, Request] = {}
        for seq_id, report in of_prompts.items():
            known = self._request_of.get(seq_id)  # None: the request was aborted meanwhile
            if known is not None and known.take_prompt_report(report):
                requests[known.request_id] = known
                self._fail(known.samples[seq_id].seq)
        for seq in collected.advanced:
            request = self._request_of[seq.seq_id]
            requests[request.request_id] = request
            if (times := request.metrics).first_token_time is None:
                self._stats.observed["time_to_first_token_seconds"].add(now - times.arrival_time)
            self.num_generation_tokens += request.take_tokens(seq, of_samples.get(seq.seq_id, ()), now)
            if math.isnan(request.samples[seq.seq_id].cumulative_logprob):
                self._fail(seq)
            if seq.finish_reason == "error" and seq.stop_reason == why_no_token(()):
                from nanoengine.sampling.penalties import emptied_by

                if reason := emptied_by(seq, self.checkpoint.vocab_size):
                    seq.stop_reason = UNDRAWN + reason
        self._hand_over(requests.values())
        stopwatch.lap("update")

    def _fail(self, seq: Sequence) -> None:
        """Finish a sequence whose log-probabilities are NaN. Its last token may have finished it already."""
        if not seq.is_finished:
            self.scheduler.finish(seq, "error")
        reason = "a log-probability is NaN: the logits are NaN or infinite"
        seq.finish_reason, seq.stop_reason = "error", reason

    def _hand_over(self, requests: Iterable[Request]) -> None:
        """Make outputs for requests that changed, if they are streamed or finished. Forget finished ones."""
        for request in requests:
            is_finished = request.finished
            output = request.output() if is_finished or request.is_streamed else None
            if is_finished:  # forget it first: a consumer in another thread may use the output immediately
                self._forget(request)
            if output is not None:
                request.inbox.put(output)

    def _forget(self, request: Request) -> None:
        self._stats.add(request)
        seqs = [sample.seq for sample in request.samples.values()]
        if reasons := {str(seq.stop_reason) for seq in seqs if seq.finish_reason == "error"}:
            reason = "; ".join(reasons)
            logging.getLogger(__name__).error("request %s failed: %s", request.request_id, reason)
        self._unlist(request)

    def _unlist(self, request: Request) -> None:
        del self.requests[request.request_id]
        for seq_id in request.samples:
            del self._request_of[seq_id]
