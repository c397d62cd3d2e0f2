"""Tries an engine as a node would use it, in a child process, so that a crashing library ends only that.

Two engines of the child write a megabyte from one to the other, in GPU memory if there is any. NIXL's UCX
then prints the transport that carried the bytes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from kvconnect.addresses import is_loopback

_BYTES = 1 << 20
_WRITE_S = 10.0
_CHILD_S = 60.0
_NEAR = "^sm,cuda_ipc"
"""UCX_TLS without transports that work within one host only."""
_UCX_WRITE = "remote memory write by ucp_put"
_UCX_CELLS = re.compile(r"\|([^|]+)\|([^|]+)\|([^|]+)\|\s*$")


class Trial(msgspec.Struct, frozen=True):
    """The result. ``wire`` is UCX's name for the transport used; ``error`` is empty if the bytes arrived."""

    lane: str = ""
    wire: str = ""
    error: str = ""


def run_trial(
    engine: str, host: str, protocol: str = "auto", options: Mapping[str, Any] = MappingProxyType({})
) -> Trial:
    """Try an engine that ``create_engine`` makes of these.

    With a ``host`` for other machines, without UCX's transports within one, unless UCX_TLS is set.
    """
    environ = {**os.environ, "UCX_PROTO_INFO": "y"}
    if not is_loopback(host):
        environ.setdefault("UCX_TLS", _NEAR)
    asked = msgspec.json.encode((engine, host, protocol, dict(options))).decode()
    command = [sys.executable, "-m", "kvconnect.tools.trial", asked]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_S, env=environ)
    except subprocess.TimeoutExpired:
        return Trial(error=f"it did not start within {_CHILD_S:g} s")
    lines = done.stdout.splitlines()
    try:
        tried = msgspec.json.decode(lines[-1] if lines else "", type=Trial)
    except msgspec.MsgspecError:
        last_line = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        return Trial(error=f"its process ended with {done.returncode}; its output ends: {last_line}")
    return msgspec.structs.replace(tried, wire=wire_of(lines))


def wire_of(lines: list[str]) -> str:
    """The transport of UCX's largest writes, from the tables that it prints; empty if there are none."""
    found, is_write = "", False
    for line in lines:
        if " by ucp_" in line:
            is_write = _UCX_WRITE in line
        elif is_write and (cells := _UCX_CELLS.search(line)) and "inf" in cells[1]:
            found = cells[3].strip()
    return found


def main() -> None:
    """The child process; its argument has the arguments of ``run_trial``."""
    try:
        tried = _try(*msgspec.json.decode(sys.argv[1]))
    except Exception as error:
        tried = Trial(error=str(error) or repr(error))
    sys.stdout.flush()
    print(f"\n{msgspec.json.encode(tried).decode()}", flush=True)
    # A library that is partly initialised may hang at exit.
    os._exit(0)


def _try(name: str, host: str, protocol: str, options: Mapping[str, Any]) -> Trial:
    import torch

    from kvconnect.engine.base import Batch, Span
    from kvconnect.engine.registry import create_engine

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    memory = [torch.full((_BYTES,), value, dtype=torch.uint8, device=device) for value in (7, 0)]
    engines = [create_engine(name, host=host, protocol=protocol, options=options) for _ in memory]
    for engine, tensor in zip(engines, memory, strict=True):
        engine.register([Span(tensor.data_ptr(), _BYTES, device)])
    source, target = engines
    source.connect("target", target.card())
    begin, end = (tensor.data_ptr() for tensor in memory)
    source.submit(Batch(1, "target", begin, end, _BYTES, timeout_s=_WRITE_S))
    done, deadline = source.poll(), time.monotonic() + 2 * _WRITE_S
    while not done and time.monotonic() < deadline:
        target.poll()
        done = source.poll()
    error = done[0].error if done else "a write did not end"
    if not error and not bool((memory[1] == 7).all()):
        error = "a write ended, and other bytes arrived"
    return Trial(source.capabilities.lane, error=error)


if __name__ == "__main__":
    main()
