"""The engine behind asyncio: many coroutines, one thread that steps."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self

from nanoengine.config import EngineConfig
from nanoengine.engine import LLMEngine
from nanoengine.outputs import RequestOutput
from nanoengine.requests import Prompt
from nanoengine.sampling_params import SamplingParams


@dataclass(slots=True)
class _Mailbox:
    """What one consumer has not taken yet: never more than one output, since later ones are merged in."""

    loop: asyncio.AbstractEventLoop
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    output: RequestOutput | None = None
    error: BaseException | None = None

    def put(self, item: RequestOutput | BaseException) -> None:
        """Deliver from the engine's thread."""
        with suppress(RuntimeError):  # its event loop is closed: nobody is left to take it
            self.loop.call_soon_threadsafe(self._put, item)

    def _put(self, item: RequestOutput | BaseException) -> None:
        if isinstance(item, BaseException):
            self.error = item
        else:
            self.output = item if self.output is None else self.output.merged_with(item)
        self.arrived.set()

    async def take(self) -> RequestOutput:
        """Wait for an output, or raise the error that took its place."""
        await self.arrived.wait()
        self.arrived.clear()
        if self.output is None:
            assert self.error is not None
            raise self.error
        output, self.output = self.output, None
        if self.error is not None:
            self.arrived.set()
        return output


class AsyncLLM:
    """`LLM` for asyncio: requests of many coroutines run in one batch, stepped by a thread of its own.

    A slow consumer costs no memory beyond its own output: what it has not taken is merged into one
    output. At most `max_concurrent_requests` are in the engine; further ones wait in `generate`.

    >>> async def main():  # doctest: +SKIP
    ...     async with AsyncLLM("Qwen/Qwen3-0.6B") as engine:
    ...         async for out in engine.generate("Hello", SamplingParams(), "request-1"):
    ...             print(out.outputs[0].text)

    Args:
        model: as `LLM`.
        max_concurrent_requests: how many `generate` calls are served at a time.
        settings: as `LLM`.
    """

    def __init__(self, model: str, *, max_concurrent_requests: int = 1024, **settings: Any) -> None:
        self.llm_engine = LLMEngine(EngineConfig(model=model, **settings))  # from here on the thread's alone
        self._slots = asyncio.Semaphore(max_concurrent_requests)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed, self._lock = False, threading.Lock()
        self._mailboxes: dict[str, _Mailbox] = {}  # likewise the thread's
        self._thread = threading.Thread(target=self._run, name="nanoengine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """The same under vLLM's name."""
        return cls(**asdict(engine_args))

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        **unserved: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the request's outputs, of the kind `sampling_params.output_kind` asks for.

        Leaving the loop, or cancelling the task, aborts the request and frees its blocks.

        Raises:
            ValueError, TypeError: as `LLMEngine.add_request`.
            RuntimeError: the engine is closed; and whatever a failed step raised.
        """
        sampling_params = deepcopy(sampling_params)  # others may change it while this waits
        async with self._slots:
            mailbox = _Mailbox(asyncio.get_running_loop())

            def add() -> None:
                self.llm_engine.add_request(
                    request_id, prompt, sampling_params, priority=priority, **unserved
                )
                self._mailboxes[request_id] = mailbox

            finished = False
            try:
                await self._call(add)
                while not finished:
                    output = await mailbox.take()
                    finished = output.finished
                    yield output
            finally:
                if not finished:
                    with suppress(RuntimeError):  # closed: aborted already
                        self._send(lambda: self._abort(request_id, mailbox))

    async def abort(self, request_id: str) -> None:
        """End a request; its consumer gets a last output with finish_reason "abort"."""
        await self._call(lambda: self._abort(request_id, self._mailboxes.get(request_id)))

    def close(self) -> None:
        """End every request with "abort", stop the thread and release the memory. May be called twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        self._thread.join()

    shutdown = close  # vLLM's name

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    async def _call(self, command: Callable[[], None]) -> None:
        """Run a command in the engine's thread and wait for it; its exception is raised here."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def run() -> None:
            error = None
            try:
                command()
            except Exception as caught:
                error = caught
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, error)

        self._send(run)
        await done

    def _send(self, command: Callable[[], None]) -> None:
        # Under the lock nothing can be queued behind the end mark, where nobody would run it.
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._commands.put(command)

    # -- in the engine's thread

    def _run(self) -> None:
        while True:
            try:
                # Sleep while there is nothing to compute; otherwise only look.
                command = self._commands.get(block=not self.llm_engine.has_unfinished_requests())
            except queue.Empty:
                self._step()
                continue
            if command is None:
                break
            command()
        for request_id in list(self._mailboxes):
            self._abort(request_id, self._mailboxes[request_id])
        self.llm_engine.close()

    def _step(self) -> None:
        try:
            outputs = self.llm_engine.step()
        except Exception as error:
            # Nobody knows whose fault it was, so everybody is told and the engine starts afresh.
            for request_id, mailbox in self._mailboxes.items():
                self.llm_engine.abort_request(request_id)
                mailbox.put(error)
            self._mailboxes.clear()
            return
        for output in outputs:
            self._mailboxes[output.request_id].put(output)
            if output.finished:
                del self._mailboxes[output.request_id]

    def _abort(self, request_id: str, mailbox: _Mailbox | None) -> None:
        # Another request may have taken the id since: the mailbox tells.
        if mailbox is None or self._mailboxes.get(request_id) is not mailbox:
            return
        del self._mailboxes[request_id]
        for output in self.llm_engine.abort_request(request_id):
            mailbox.put(output)
