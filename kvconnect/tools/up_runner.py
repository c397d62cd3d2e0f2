"""``kvconnect up``: runs P, D and a router here, shows that KV is transferred, and ends them with itself."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from kvconnect.config import ExtraConfig
from kvconnect.node.children import Child, ChildFailed, Children, answers
from kvconnect.tools.local_pair import LocalPair, ServerCommand, look_at_host, look_at_model, plan_pair
from kvconnect.tools.transfer_check import check, route_of

_START_TIMEOUT_S = 1800.0
"""A model may have to be downloaded."""
_NOTED_EACH_S = 15.0
_POLLED_EACH_S = 0.2
_ENDS_WITHIN_S = 20.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_up(model: str, port: int, options: Sequence[str]) -> int:
    """Run until Ctrl-C or SIGTERM. Returns the exit code: 1 if a process ends, or no KV is transferred.

    Raises ``ConfigError`` with all that is missing, before anything is started.
    """
    return run_pair(plan_pair(look_at_model(model), look_at_host(port), port, options), model)


def run_pair(pair: LocalPair, model: str) -> int:
    """As ``run_up``, with these processes. Signals are handled until the end of this one."""
    folder = Path(tempfile.mkdtemp(prefix="kvconnect-up-"))
    code = 1
    # What ends this process raises, so that its children are ended too.
    for number in _SIGNALS:
        signal.signal(number, _raise_exit)
    with Children(folder) as children:
        try:
            print(f"logs are in {folder}; Ctrl-C ends all three processes", flush=True)
            prefill = _start(children, folder, pair.prefill)
            if pair.one_by_one:
                _wait(children, [prefill])
            _wait(children, [prefill, _start(children, folder, pair.decode)])
            router = _start(children, folder, pair.router)
            router.wait_answer("/ready?all")
            found = check(route_of([pair.router.url]), ExtraConfig())
            print(found, flush=True)
            if not found.problem:
                print(_example(pair.router.url, model), flush=True)
                children.wait_for_an_end()
        except ChildFailed as error:
            print(f"kvconnect: {error}", flush=True)
        except SystemExit:
            code = 0
        # A second Ctrl-C must leave no process behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("ending the processes", flush=True)
        children.end(_ENDS_WITHIN_S)
    if not code:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _start(children: Children, folder: Path, launch: ServerCommand) -> Child:
    print(f"\n{launch}\n", flush=True)
    log = folder / f"{launch.name}.log"
    environment = {"PYTHONUNBUFFERED": "1", **launch.environment}
    # Python drops what a signal handler raises while it forks, in the callbacks of modules such as logging.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        return children.add(Child(launch.name, launch.command, log, environment, launch.url))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(children: Children, servers: Sequence[Child]) -> None:
    """Wait until all servers answer. Raises ``ChildFailed``: one ended, or took too long."""
    begun = noted = time.monotonic()
    missing = list(servers)
    while missing := [server for server in missing if not answers(f"{server.url}/health", timeout_s=2.0)]:
        children.check()
        now = time.monotonic()
        if now - begun > _START_TIMEOUT_S:
            raise ChildFailed(f"{missing[0].name} was not ready in time\n{missing[0].tail()}")
        if now - noted > _NOTED_EACH_S:
            noted = now
            for server in missing:
                last = next(reversed(server.output().splitlines()), "")
                print(f"{server.name} has been starting for {now - begun:.0f} s: {last[:100]}", flush=True)
        time.sleep(_POLLED_EACH_S)


def _example(url: str, model: str) -> str:
    return (
        f"\nready at {url}; for instance\n\n"
        f"curl -s {url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f'  -d \'{{"model": "{model}", "prompt": "{_PROMPT}", "max_tokens": 16}}\'\n'
    )


_PROMPT = "The sea is blue where the water is deep, and green along the shore. The sky above it is"


def _raise_exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
