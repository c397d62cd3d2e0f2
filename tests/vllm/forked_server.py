"""vLLM's server as a program of ``tests.nursery``: whatever it starts is forked too.

vLLM's command wants its processes to be spawned, each of which would import all of vLLM again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal

# What the server, the process of its engine and a worker import, each at its time.
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.entrypoints.launchers.api_server.entry import main as serve

from kvconnect.demo.children import die_with_parent


def main() -> None:
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment, misc]
    os.register_at_fork(after_in_child=lambda: die_with_parent(signal.SIGKILL))
    serve()
