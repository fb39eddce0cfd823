"""Weights from a learner in another process: rank 0 of a group over gloo, which broadcasts them one by one.

Which tensors come, and in which order, the two have to know from elsewhere: `learner.py`. The functions
below are a learner's, by the names under which trl asks vLLM for them, whose group is NCCL's.
"""

from collections.abc import Callable, Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed  # whose groups' own methods have no types

LEARNER, ENGINE = range(2)  # ranks
PATIENCE = timedelta(seconds=60)  # for the other to come, and for a tensor


class WeightGroup:
    """A learner and an engine, each of which makes one, at the same time.

    Args:
        address, port: of the learner, where the two meet.
        rank: LEARNER or ENGINE.

    Raises:
        RuntimeError: the other does not come.
    """

    def __init__(self, address: str, port: int, rank: int) -> None:
        gloo, is_learner = dist.ProcessGroupGloo, rank == LEARNER
        store = dist.TCPStore(address, port, is_master=is_learner, timeout=PATIENCE, wait_for_workers=False)
        options = gloo._Options()
        options._timeout = PATIENCE
        is_one_host = address in ("127.0.0.1", "localhost")
        options._devices = [
            gloo.create_device(hostname="127.0.0.1") if is_one_host else gloo.create_default_device()
        ]
        self._group = gloo(dist.PrefixStore("weights", store), rank, 2, options)

    def send(self, tensor: Tensor) -> None:
        """As the learner; RuntimeError where the engine is gone, or refused what was announced."""
        self._broadcast(tensor.detach().cpu().contiguous())

    def receive(self, announced: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
        """As the engine: tensors by their names; RuntimeError where the learner is gone."""
        return {name: self._broadcast(torch.empty(shape, dtype=dtype)) for name, dtype, shape in announced}

    def close(self) -> None:
        """Let the other know that nothing comes any more."""
        self._group = None

    def _broadcast(self, tensor: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = LEARNER, 0
        self._group.broadcast([tensor], options).wait()
        return tensor


def get_ip() -> str:
    """Where this process waits for the engine: on this machine."""
    return "127.0.0.1"


def trainer_init(init_info: dict[str, Any]) -> WeightGroup:
    """A learner's end of the group."""
    group: Any = WeightGroup(init_info["master_address"], init_info["master_port"], LEARNER)
    group.group = SimpleNamespace()  # trl takes vLLM's socket out of it in the end
    return group  # type: ignore[no-any-return]


def packed_nccl_broadcast_producer(
    iterator: Iterable[tuple[str, Tensor]],
    group: WeightGroup,
    src: int,
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor],
) -> None:
    """Send what was announced."""
    for item in iterator:
        group.send(post_iter_func(item))
