"""Receive weights from a learner in another process, which broadcasts them one by one over gloo.

The learner is rank 0 of a group of two. Both sides must agree in advance on the tensors and their order:
`learner.py`. The functions at the end run in the learner's process. They have the names that trl imports from
vLLM, whose group uses NCCL.
"""

from collections.abc import Callable, Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed  # the methods of its process groups have no type annotations

LEARNER, ENGINE = range(2)  # ranks
TIMEOUT = timedelta(seconds=60)  # for the other side to connect, and for each tensor


class WeightGroup:
    """Connects a learner and an engine. Each creates one, at the same time.

    Args:
        address, port: where the learner listens.
        rank: LEARNER or ENGINE.

    Raises:
        RuntimeError: the other side does not connect.
    """

    def __init__(self, address: str, port: int, rank: int) -> None:
        gloo, is_learner = dist.ProcessGroupGloo, rank == LEARNER
        store = dist.TCPStore(address, port, is_master=is_learner, timeout=TIMEOUT, wait_for_workers=False)
        options = gloo._Options()
        options._timeout = TIMEOUT
        is_one_host = address in ("127.0.0.1", "localhost")
        local = {"hostname": "127.0.0.1"}
        options._devices = [gloo.create_device(**local) if is_one_host else gloo.create_default_device()]
        self._group = gloo(dist.PrefixStore("weights", store), rank, 2, options)

    def send(self, tensor: Tensor) -> None:
        """Send a tensor, as the learner. RuntimeError: the engine is gone, or refused the announcement."""
        self._broadcast(tensor.detach().cpu().contiguous())

    def receive(self, announced: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
        """Receive the announced tensors, as the engine, by name. RuntimeError: the learner is gone."""
        return {name: self._broadcast(torch.empty(shape, dtype=dtype)) for name, dtype, shape in announced}

    def close(self) -> None:
        """Close the connection, so that the other side does not wait."""
        self._group = None

    def _broadcast(self, tensor: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = LEARNER, 0
        self._group.broadcast([tensor], options).wait()
        return tensor


def get_ip() -> str:
    """Return the address where the learner listens: this machine."""
    return "127.0.0.1"


def trainer_init(init_info: dict[str, Any]) -> WeightGroup:
    """Create the learner's end of the group."""
    group: Any = WeightGroup(init_info["master_address"], init_info["master_port"], LEARNER)
    group.group = SimpleNamespace()  # trl deletes vLLM's socket from it at the end
    return group  # type: ignore[no-any-return]


def packed_nccl_broadcast_producer(
    iterator: Iterable[tuple[str, Tensor]],
    group: WeightGroup,
    src: int,
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor],
) -> None:
    """Send the announced tensors."""
    for item in iterator:
        group.send(post_iter_func(item))
