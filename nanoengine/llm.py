"""Defines `LLM`, the class that most users need: an `LLMEngine` that also generates, chats and streams."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from nanoengine.config import EngineConfig
from nanoengine.llm_engine import LLMEngine
from nanoengine.outputs import Inbox, RequestOutput
from nanoengine.requests import CheckedRequest, Prompt, split_prompts
from nanoengine.sampling_params import RequestOutputKind, SamplingParams, refuse_unserved, takes
from nanoengine.signals import uninterrupted


class LLM(LLMEngine, AbstractContextManager["LLM"]):
    """Runs a model offline. Its arguments are the settings of `EngineConfig`. Names are vLLM's.

    Only one thread may use it at a time: use `AsyncLLM` for several threads. Requests that are added to it,
    and open streams, advance together, also during `generate`.

    >>> with LLM("Qwen/Qwen3-0.6B") as llm:  # doctest: +SKIP
    ...     print(llm.generate("Hello", SamplingParams(max_tokens=8))[0].outputs[0].text)

    Raises:
        TypeError: an argument does not exist.
        ValueError: a setting or checkpoint is not supported. No memory stays allocated.
    """

    @takes(EngineConfig)
    def __init__(self, model: str | Path, **settings: Any) -> None:
        super().__init__(EngineConfig(model=model, **settings))
        self._next_id = 0  # of its own calls' requests; users' ids are strings

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """Make an `LLM` from a config, under vLLM's name."""
        return cls(**{item.name: getattr(engine_args, item.name) for item in fields(engine_args)})

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, which is this object itself."""
        return self

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
        **unserved: Any,
    ) -> list[RequestOutput]:
        """Complete prompts. Returns the outputs in the order of the prompts.

        Args:
            prompts: a string, a list of token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`,
                or a list of these.
            sampling_params: one for all prompts, or one per prompt. None: `get_default_sampling_params()`.
            use_tqdm: show progress, with `tqdm` or with the callable given in place of it.
            priority: one, or one per prompt, with `scheduling_policy="priority"`. A lower number runs first.
            unserved: vLLM's other arguments, accepted if they are a no-op: see unknown_arguments.py.

        Raises:
            ValueError, TypeError: a prompt or parameter is invalid. No request was queued. After
                any other exception, this call's requests are aborted and the engine stays usable.
        """
        refuse_unserved(self.generate, unserved)
        kind = RequestOutputKind.FINAL_ONLY
        return self._run(self._check_all(prompts, sampling_params, priority, kind), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete prompts, and yield new text and tokens of each prompt as they arrive.

        Invalid arguments raise at the call, as in `generate`. An output's `request_id` is the prompt's index,
        and its last output has `finished` set. Leaving the loop, or closing the iterator, aborts the rest.
        """
        return self._drain(self._check_all(prompts, sampling_params, priority, RequestOutputKind.DELTA), 0)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
        **unserved: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation (a list of `{"role": ..., "content": ...}`), or several at once.

        A content is a string, or a list of text parts. `tools` are passed to the chat template.

        Raises:
            ValueError: the tokenizer has no chat template, or a content is not text. `generate` lists others.
        """
        refuse_unserved(self.chat, unserved)
        settings: dict[str, Any] = {"chat_template": chat_template, "tools": tools}
        settings["add_generation_prompt"] = add_generation_prompt
        settings["continue_final_message"] = continue_final_message
        prompts = self.render_chat(messages, **settings | (chat_template_kwargs or {}))
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def render_chat(self, messages: Sequence[Any], **template_settings: Any) -> list[dict[str, Any]]:
        """Render conversations with the chat template. Returns prompts for `generate` and the like."""
        from nanoengine.chat.templates import render_chats

        settings = {"add_generation_prompt": True, **template_settings}
        return render_chats(messages, self.get_tokenizer(), self.checker.encode, **settings)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of the checkpoint's generation_config, else vLLM's defaults."""
        return self.checkpoint.default_sampling_params()

    def receipt(self) -> dict[str, Any]:
        """Return where the seconds of the last run went. The first call begins to record: see receipt.py."""
        from nanoengine.extensions.receipt import recorder_of

        return recorder_of(self.core, self.started).receipt()

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- how the calls above and the user's own requests share the engine

    def _check_all(
        self, prompts: Any, sampling_params: Any, priority: Any, kind: RequestOutputKind
    ) -> list[CheckedRequest]:
        """Validate all requests of a call before any of them is queued."""
        prompt_list = split_prompts(prompts)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params_list = [params] * len(prompt_list) if isinstance(params, SamplingParams) else params
        is_one = priority is None or isinstance(priority, int)
        priorities = [0 if priority is None else priority] * len(prompt_list) if is_one else priority
        for name, values in (("sampling_params", params_list), ("priority", priorities)):
            if not isinstance(values, list | tuple):
                raise TypeError(f"{name} must be one for all prompts or a list, got {values!r}")
            if len(values) != len(prompt_list):
                raise ValueError(f"{name} must be one per prompt: got {len(values)} for {len(prompt_list)}")
        requests = zip(prompt_list, params_list, priorities, strict=True)
        checked = [self.check(*request) for request in requests]
        for one in checked:
            one.params.output_kind = kind  # params is the request's own copy
        return checked

    def _run(self, checked: list[CheckedRequest], use_tqdm: Any) -> list[RequestOutput]:
        """Run a call's requests until they finish, and return their outputs in order."""
        start, num_prompt_tokens, num_output_tokens = time.monotonic(), 0, 0
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        outputs: list[RequestOutput] = []
        # Signals also take effect between steps, but never while requests are queued or aborted.
        with (
            uninterrupted() as handle_signals,
            make_bar(total=len(checked), desc="Processed prompts", disable=not use_tqdm) as bar,
            closing(self._drain(checked, self._next_id, handle_signals)) as drained,
        ):
            for output in drained:
                outputs.append(output)
                num_prompt_tokens += len(output.prompt_token_ids)
                num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                elapsed = time.monotonic() - start
                rates = f"{num_prompt_tokens / elapsed:.0f} prompt tokens/s, "
                rates += f"{num_output_tokens / elapsed:.0f} output tokens/s"
                bar.set_postfix_str(rates, refresh=False)
                bar.update()
        return sorted(outputs, key=lambda output: int(output.request_id))

    def _drain(
        self, checked: list[CheckedRequest], number: int, after_step: Callable[[], None] = lambda: None
    ) -> Generator[RequestOutput]:
        """Queue a call's requests, and yield outputs until all finish. Their ids count from `number`."""
        ids, inbox = range(self._next_id, self._next_id + len(checked)), Inbox()
        self._next_id, left = ids.stop, set(ids)
        try:
            for request_id, one in zip(ids, checked, strict=True):
                self.submit(request_id, one, inbox)
            while left:
                if not inbox:
                    self.advance()
                    after_step()
                for request_id in sorted(inbox):
                    output = inbox.pop(request_id)
                    if output.finished:
                        left.remove(request_id)
                    yield replace(output, request_id=str(number + request_id - ids.start))
        finally:
            try:
                self.abort_request(ids)
            finally:  # a signal's handler may have raised as that call began
                self.abort_request(ids)
