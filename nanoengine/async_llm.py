"""Defines `AsyncLLM`, the engine for asyncio: many coroutines share one thread that runs the steps."""

import asyncio
import atexit
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from copy import copy, deepcopy
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from torch import Tensor

from nanoengine.config import NULLABLE, EngineConfig
from nanoengine.llm_engine import LLMEngine
from nanoengine.outputs import EngineDeadError, RequestOutput
from nanoengine.requests import CheckedRequest, Prompt
from nanoengine.sampling_params import accepts, takes
from nanoengine.signals import uninterrupted

if TYPE_CHECKING:  # at run time it is imported when metrics are requested
    from nanoengine.metrics import Metric

T = TypeVar("T")


@dataclass(slots=True)
class _Mailbox:
    """Holds the output that one consumer has not taken yet. Later outputs are merged into it."""

    loop: asyncio.AbstractEventLoop
    outgoing: dict[asyncio.AbstractEventLoop, list[tuple["_Mailbox", RequestOutput]]]  # shared by all
    output: RequestOutput | None = None
    waiter: asyncio.Future[None] | None = None  # the consumer waits for its result

    def put(self, output: RequestOutput) -> None:
        """Add an output to those that `AsyncLLM._deliver` sends. The engine's thread calls this."""
        self.outgoing.setdefault(self.loop, []).append((self, output))

    @staticmethod
    @uninterrupted()
    def receive(outputs: list[tuple["_Mailbox", RequestOutput]]) -> None:
        """Wake the consumers of these outputs. Their event loop calls this."""
        for mailbox, output in outputs:
            mailbox.output = output if mailbox.output is None else mailbox.output.merged_with(output)
            if mailbox.waiter is not None and not mailbox.waiter.done():
                mailbox.waiter.set_result(None)

    async def take(self) -> RequestOutput:
        """Wait for an output, and return it."""
        if self.output is None:
            self.waiter = self.loop.create_future()
            await self.waiter
        output, self.output = self.output, None
        assert output is not None
        return output


@accepts("engine", NULLABLE)
@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncConfig(EngineConfig):
    """Holds the settings of an `AsyncLLM`: those of an engine, and a limit."""

    max_concurrent_requests: int = 1024  # limit on requests in the engine; further ones wait in `generate`


class AsyncLLM(AbstractAsyncContextManager["AsyncLLM"]):
    """Serves many coroutines from one engine: their requests share batches, and a thread runs the steps.

    The coroutines may belong to several event loops, one after another or in several threads. `model` and
    `settings` are those of `LLM`. At most `max_concurrent_requests` are in the engine, and further ones wait
    in `generate`. Outputs that a slow consumer has not taken are merged into one.

    >>> async def main():  # doctest: +SKIP
    ...     async with AsyncLLM("Qwen/Qwen3-0.6B") as engine:
    ...         async for out in engine.generate("Hello", SamplingParams(), "request-1"):
    ...             print(out.outputs[0].text)
    """

    @takes(AsyncConfig)
    def __init__(self, model: str | Path, **settings: Any) -> None:
        config = AsyncConfig(model=model, **settings)
        self._max_concurrent_requests = config.max_concurrent_requests
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._checks = ThreadPoolExecutor(1, "nanoengine-checks")  # one thread: requests keep their order
        self._grammar_checks = ThreadPoolExecutor(thread_name_prefix="nanoengine-grammar-checks")
        self._closed, self._lock = False, threading.Lock()
        # Requests beyond the limit: ids, and what admits them. Only for the thread
        self._waiting: deque[tuple[str, Callable[[], None]]] = deque()
        self._outgoing: dict[Any, Any] = {}  # outputs that `_deliver` will send; only for the thread
        self.llm_engine = LLMEngine(config, self._deliver)  # only the thread steps it
        self._thread = threading.Thread(target=self._run, name="nanoengine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that computes during interpreter shutdown would crash

    __reduce__ = LLMEngine.__reduce__

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """Make an engine from a config, under vLLM's name."""
        return cls(**{item.name: getattr(engine_args, item.name) for item in fields(engine_args)})

    async def generate(
        self,
        prompt: Prompt | CheckedRequest,
        sampling_params: Any,
        request_id: str,
        *,
        priority: int = 0,
        **unserved: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield a request's outputs, of the kind that `sampling_params.output_kind` selects.

        A separate thread tokenizes and checks the prompt, unless it is the result of `LLMEngine.check`.
        Leaving the loop, or cancelling the task, aborts the request and frees its blocks. After a failed
        step, its requests are recomputed. If that fails too, they finish with finish_reason "error".

        Raises:
            ValueError, TypeError: the id is in use, or the request cannot be served.
            RuntimeError: the engine is closed.
        """
        mailbox = _Mailbox(asyncio.get_running_loop(), self._outgoing)
        checked = prompt
        if not isinstance(prompt, CheckedRequest):
            self._check_running()
            if sampling_params is None:
                sampling_params = self.llm_engine.checkpoint.default_sampling_params()
            # A copy, because the caller may change the params during the wait below. The logits processors
            # in it stay the caller's own objects.
            processors = getattr(sampling_params, "logits_processors", None)
            params = deepcopy(sampling_params, {id(processors): copy(processors)})
            # Tokenizing a long text blocks neither the event loop nor a step. Requests keep their order,
            # except that none waits for another one's grammar to compile.
            has_grammar = getattr(params, "structured_outputs", None) is not None
            submit = (self._grammar_checks if has_grammar else self._checks).submit
            checked = await self._call(lambda: self.llm_engine.check(prompt, params, priority), submit)

        def add() -> None:
            self.llm_engine.add_request(request_id, checked, inbox=mailbox, **unserved)

        finished = False
        try:
            await self._call(add, lambda run: self._send(lambda: self._waiting.append((request_id, run))))
            while not finished:
                output = await mailbox.take()
                finished = output.finished
                yield output
        finally:
            if not finished:
                with uninterrupted(), suppress(RuntimeError):  # closed: the request is aborted already
                    self._send(lambda: self._abort(request_id, mailbox))

    def get_tokenizer(self) -> Any:
        """Return the transformers tokenizer, or None if the checkpoint has none."""
        return self.llm_engine.get_tokenizer()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort one request or several. A consumer gets a last output with finish_reason "abort"."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._call(lambda: self._abort_all(ids))

    async def get_metrics(self) -> list["Metric"]:
        """Return the metrics of `LLMEngine.get_metrics`, read between two steps."""
        return await self._call(self.llm_engine.get_metrics)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Returns False and does nothing while requests are running."""
        return await self._call(self.llm_engine.reset_prefix_cache)

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all or some weights like `LLMEngine.update_weights`, between two steps."""
        await self._call(lambda: self.llm_engine.update_weights(weights))

    @property
    def is_running(self) -> bool:
        """Whether requests are served: the engine is not closed, and its thread is alive."""
        return not self._closed and self._thread.is_alive()

    def _check_running(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        self.llm_engine.check_ready()

    def close(self) -> None:
        """Abort every request, stop the thread and release the memory. A second call is a no-op."""
        with uninterrupted(), self._lock:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        self._checks.shutdown(wait=False)
        self._grammar_checks.shutdown(wait=False)
        self._thread.join()
        atexit.unregister(self.close)

    shutdown = close  # vLLM's name

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    async def _call(
        self, command: Callable[[], T], submit: Callable[[Callable[[], None]], object] | None = None
    ) -> T:
        """Run a command in the thread that `submit` selects (the engine's), and return its result.

        Signals wait while `submit` takes a lock of concurrent.futures, and the event loop's thread takes no
        other: a handler that raises just after would leave it locked, and another thread would wait forever.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            if done.cancelled():  # while it waited in the queue
                return
            try:
                deliver = partial(done.set_result, command())
            except BaseException as error:  # a tokenizer's panic, no Exception, must not end the thread
                deliver = partial(done.set_exception, error)
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(uninterrupted()(lambda: done.done() or deliver()))

        try:
            with uninterrupted():
                (submit or self._send)(run)
            return await done
        finally:
            done.cancel()  # no-op unless a signal's handler raised: the command must not run later

    def _send(self, command: Callable[[], None]) -> None:
        # The lock ensures that no command is queued after the end mark, where it would never run.
        with self._lock:
            self._check_running()
            self._commands.put(command)

    # -- in the engine's thread

    def _run(self) -> None:
        try:
            while self._run_commands():
                self._step()
        finally:  # after the end mark, or after a bug: no coroutine may wait for this thread forever
            with self._lock:
                self._closed = True
            self.llm_engine.close()
            self._deliver()
            while not self._commands.empty():
                if (command := self._commands.get()) is not None:
                    command()
            for _, admit in self._waiting:
                admit()  # raises in its caller: the engine is closed

    def _run_commands(self) -> bool:
        """Run the queued commands, and wait for one if the engine is idle. Returns False at the end mark."""
        is_idle = not (self._waiting or self.llm_engine.has_unfinished_requests())
        if is_idle or not self._commands.empty():  # the next forward pass may be far off
            self._deliver()
        # Run only those queued now, so that a flood of commands cannot keep the engine from stepping.
        for _ in range(max(is_idle, self._commands.qsize())):
            command = self._commands.get()
            if command is None:
                return False
            command()
        num_places = self._max_concurrent_requests - len(self.llm_engine.requests)
        for _ in range(min(len(self._waiting), num_places)):
            self._waiting.popleft()[1]()
        return True

    def _step(self) -> None:
        try:
            self.llm_engine.advance()
        except EngineDeadError:
            raise  # ends all requests and the thread
        except BaseException:  # including panics, as in `_call`
            logging.getLogger(__name__).exception("a step failed and is computed again")

    def _deliver(self) -> None:
        """Send the outputs since the last call to their consumers, with one callback per event loop.

        The runner calls this just before each forward pass, in which the event loop has the interpreter lock
        for itself. If outputs were sent after each step, the two threads would compete for it.
        """
        for loop, outputs in self._outgoing.items():
            with suppress(RuntimeError):  # the event loop is closed: drop its outputs
                loop.call_soon_threadsafe(_Mailbox.receive, outputs)
        self._outgoing.clear()

    def _abort_all(self, ids: list[str]) -> None:
        """Abort requests. Those that wait are admitted first, so that their consumers get an output too."""
        waiting, self._waiting = self._waiting, deque()
        for request_id, admit in waiting:
            if request_id in ids:
                admit()
            else:
                self._waiting.append((request_id, admit))
        self.llm_engine.abort_request(ids)

    def _abort(self, request_id: str, mailbox: _Mailbox) -> None:
        """Abort a request, unless its id belongs to another mailbox by now."""
        if getattr(self.llm_engine.requests.get(request_id), "inbox", None) is mailbox:
            self.llm_engine.abort_request(request_id)


AsyncLLMEngine = AsyncLLM  # vLLM's older name
