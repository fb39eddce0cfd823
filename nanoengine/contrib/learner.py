"""Server routes for an RL learner, under vLLM's paths: sleep, and weights over gloo. Only with --dev-mode.

A learner sends weights in four calls. The third may be repeated:

    /init_weight_transfer_engine    connect to the learner, which is rank 0 of a group of two
    /start_weight_update
    /update_weights                 announces tensors, which the learner broadcasts meanwhile: `WeightGroup`
    /finish_weight_update           replace the engine's weights with all of the tensors, or with none
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from fastapi import Query
from fastapi.responses import Response
from pydantic import BaseModel, Field
from torch import Tensor

from nanoengine.apps.openai_api import JSON, APIError, unavailable
from nanoengine.async_llm import AsyncLLM
from nanoengine.contrib.transfer import ENGINE, WeightGroup

DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


class Meeting(BaseModel):
    """Says where the learner listens."""

    master_address: str
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1, le=1)
    world_size: int = Field(ge=2, le=2)


class InitRequest(BaseModel):
    """Asks the engine to connect to the learner."""

    init_info: Meeting


class Announcement(BaseModel):
    """Lists the tensors that the learner is about to send."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class UpdateRequest(BaseModel):
    """Asks the engine to receive the announced tensors."""

    update_info: Announcement


@contextmanager
def answering() -> Iterator[None]:
    """Turn the engine's errors into responses: 400 for invalid requests, 503 if a retry may succeed."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise APIError(400, str(error)) from None
    except RuntimeError as error:
        raise unavailable(str(error)) from None


class Learner:
    """Provides the routes for one engine."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.engine = engine
        self.group: WeightGroup | None = None
        self.received: dict[str, Tensor] | None = None  # by name, since the update was started
        self._one_at_a_time = asyncio.Lock()

    def routes(self) -> list[tuple[str, str, Callable[..., Any]]]:
        """Return methods, paths and endpoints."""
        return [
            ("POST", "/sleep", self.sleep),
            ("POST", "/wake_up", self.wake_up),
            ("GET", "/is_sleeping", self.is_sleeping),
            ("POST", "/reset_prefix_cache", self.reset_prefix_cache),
            ("GET", "/get_world_size", self.world_size),
            ("POST", "/init_weight_transfer_engine", self.meet),
            ("POST", "/start_weight_update", self.start),
            ("POST", "/update_weights", self.receive),
            ("POST", "/finish_weight_update", self.finish),
        ]

    async def sleep(self, level: int = 1) -> Response:
        """Handle POST /sleep."""
        with answering():
            await self.engine.sleep(level)
        return Response()

    async def wake_up(self, tags: Annotated[list[str] | None, Query()] = None) -> Response:
        """Handle POST /wake_up."""
        with answering():
            await self.engine.wake_up(tags)
        return Response()

    async def is_sleeping(self) -> Response:
        """Handle GET /is_sleeping."""
        with answering():
            return JSON({"is_sleeping": await self.engine.is_sleeping()})

    async def reset_prefix_cache(self) -> Response:
        """Handle POST /reset_prefix_cache. Success is false while requests run."""
        with answering():
            return JSON({"success": await self.engine.reset_prefix_cache()})

    async def world_size(self) -> Response:
        """Handle GET /get_world_size: the number of processes that receive weights."""
        return JSON({"world_size": 1})

    async def meet(self, body: InitRequest) -> Response:
        """Handle POST /init_weight_transfer_engine: connect to the learner."""
        async with self._one_at_a_time:
            where = body.init_info.master_address, body.init_info.master_port
            with answering():
                self.group = await asyncio.to_thread(WeightGroup, *where, ENGINE)
        return JSON({"message": "Weight transfer initialized"})

    async def start(self) -> Response:
        """Handle POST /start_weight_update. Discards the tensors of an unfinished update."""
        async with self._one_at_a_time:
            self.received = {}
        return JSON({"message": "Weight update started"})

    async def receive(self, body: UpdateRequest) -> Response:
        """Handle POST /update_weights. An error closes the group, so that the learner does not wait."""
        async with self._one_at_a_time:
            group, received = self.group, self.received
            self.group = self.received = None
            with answering():
                try:
                    if group is None or received is None:
                        raise ValueError("call /init_weight_transfer_engine and /start_weight_update first")
                    (shapes,) = await self.engine.collective_rpc("tensor_shapes")
                    announced = check(body.update_info, shapes)
                    received |= await asyncio.to_thread(group.receive, announced)
                except BaseException:
                    if group is not None:
                        group.close()  # else it stays open as long as Python keeps the error
                    raise
            self.group, self.received = group, received
        return JSON({"message": "Weights updated"})

    async def finish(self) -> Response:
        """Handle POST /finish_weight_update. It can be retried after a 503 (running requests)."""
        async with self._one_at_a_time:
            received, self.received = self.received, None
            with answering():
                if received is None:
                    raise ValueError("no weight update is in progress; call /start_weight_update first")
                try:
                    await self.engine.update_weights(received.items())
                except RuntimeError:
                    self.received = received
                    raise
        return JSON({"message": "Weight update finished"})


def check(
    announced: Announcement, shapes: dict[str, tuple[int, ...]]
) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Return names, dtypes and shapes, or raise ValueError before memory is allocated for unknown tensors."""
    names, dtypes, given = announced.names, announced.dtype_names, announced.shapes
    if not len(names) == len(dtypes) == len(given):
        raise ValueError("names, dtype_names and shapes must have the same length")
    for name, dtype, shape in zip(names, dtypes, given, strict=True):
        if shapes.get(name) != tuple(shape):
            raise ValueError(f"tensor {name!r} has shape {shape}, but the model needs {shapes.get(name)}")
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name!r} must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return [(name, DTYPES[dtype], shapes[name]) for name, dtype in zip(names, dtypes, strict=True)]
