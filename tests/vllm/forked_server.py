"""vLLM's server as a program of ``tests.nursery``: whatever it starts is forked too.

vLLM's command wants its processes to be spawned, each of which would import all of vLLM again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import torch
import torch.distributed

# What the server, the process of its engine and a worker import, each at its time.
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.entrypoints.launchers.api_server.entry import main as serve

from kvconnect.node.children import die_with_parent


def main() -> None:
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment, misc]
    os.register_at_fork(after_in_child=lambda: die_with_parent(signal.SIGKILL))
    # Experts that are spread over data-parallel ranks need both, and vLLM's CPU build has neither.
    CpuCommunicator.all_gatherv = _all_gatherv  # type: ignore[attr-defined]
    CpuCommunicator.reduce_scatterv = _reduce_scatterv  # type: ignore[attr-defined]
    serve()


def _gathered(group: Any, tensor: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """The tensors of all ranks, which differ in their first dimension."""
    padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    found = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(found, padded, group=group.cpu_group)
    return [one[:size] for one, size in zip(found, sizes, strict=True)]


def _all_gatherv(self: Any, given: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    if isinstance(given, list):
        return [_all_gatherv(self, one, dim, sizes) for one in given]
    return torch.cat(_gathered(self, given, sizes or [len(given)] * self.world_size))


def _reduce_scatterv(self: Any, given: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> Any:
    sizes = sizes or [len(given) // self.world_size] * self.world_size
    total = torch.stack(_gathered(self, given.float(), [len(given)] * self.world_size)).sum(0)
    return total.to(given.dtype).split(sizes)[self.rank_in_group].contiguous()
