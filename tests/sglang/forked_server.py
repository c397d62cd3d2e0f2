"""SGLang's server as a program of ``tests.nursery``: the processes that it starts are forked too.

SGLang wants its processes to be spawned, each of which would import torch and SGLang again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from typing import Any

# What the server, its scheduler and its detokenizer import, each at its time.
import sglang.srt.entrypoints.http_server
import sglang.srt.managers.scheduler  # noqa: F401
from sglang.launch_server import run_server
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from kvconnect.node.children import die_with_parent
from tests.sglang.own_backends import fit_to_cpu

_BACKEND = "--disaggregation-transfer-backend"


def main() -> None:
    start_method = multiprocessing.set_start_method

    def fork(method: str | None, force: bool = False) -> Any:
        return start_method("fork" if method == "spawn" else method, force=force)

    multiprocessing.set_start_method = fork  # type: ignore[assignment]
    os.register_at_fork(after_in_child=lambda: die_with_parent(signal.SIGKILL))
    # The library of metrics chooses at its import where values lie, which SGLang sets later.
    for name in [one for one in sys.modules if one.startswith(("prometheus_client", "kvconnect."))]:
        del sys.modules[name]
    if _BACKEND in sys.argv:
        fit_to_cpu(sys.argv[sys.argv.index(_BACKEND) + 1])
    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
