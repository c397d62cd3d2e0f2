"""What one request passes of kvconnect on P and on D: files, functions and calls.

``python -m tests.request_path --list`` names them, in the order in which they are entered first. The
node's own folder is left out: a serving stack has its own. A node that has a ``Recorder`` counts between
SIGUSR1 and SIGUSR2.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import kvconnect
from kvconnect.node.children import Child, Children, fetch_json
from tests.nursery import nodes_forked
from tests.pair_kit import serve

_PACKAGE = str(Path(kvconnect.__file__).parent) + "/"
_LEFT_OUT = ("node/", "cli/", "__main__.py")
_PROMPT = [(11 * position) % 250 for position in range(300)]


class SidePath(NamedTuple):
    """The calls of one side, by file and function, in the order in which they were made first."""

    calls: dict[tuple[str, str], int]

    @property
    def files(self) -> list[str]:
        """Each once."""
        return list(dict.fromkeys(file for file, _ in self.calls))

    @property
    def total(self) -> int:
        return sum(self.calls.values())

    def __str__(self) -> str:
        lines = [f"{len(self.files)} files, {len(self.calls)} functions, {self.total} calls"]
        for file in self.files:
            functions = [f"{name} {count}" for (where, name), count in self.calls.items() if where == file]
            lines.append(f"    {file}: {', '.join(functions)}")
        return "\n".join(lines)


def measure(folder: Path, prompts: int = 5) -> tuple[SidePath, SidePath]:
    """The path of a request on P and on D: that with the fewest calls, since a busy machine adds turns."""
    with Children(folder) as children:
        nodes = {}
        for role in ("kv_producer", "kv_consumer"):
            with nodes_forked(f"from tests.request_path import Recorder; Recorder({str(folder / role)!r})"):
                nodes[role] = serve(children, role, role, protocol="auto")
        for node in nodes.values():
            node.wait_ready()
        found = [_pass_one(nodes, folder, number) for number in range(prompts + 1)]
    # The first one meets the peer.
    prefill, decode = zip(*found[1:], strict=True)
    return min(prefill, key=lambda path: path.total), min(decode, key=lambda path: path.total)


def _pass_one(nodes: dict[str, Child], folder: Path, number: int) -> list[SidePath]:
    prompt = [(token + 37 * number) % 250 for token in _PROMPT]
    for role, node in nodes.items():
        (folder / role).unlink(missing_ok=True)
        os.kill(node.pid, signal.SIGUSR1)
    time.sleep(0.2)
    params: Any = {"do_remote_decode": True, "do_remote_prefill": False}
    for role, most in (("kv_producer", 1), ("kv_consumer", 4)):
        body = {"prompt": prompt, "max_tokens": most, "kv_transfer_params": params}
        answer = fetch_json(f"{nodes[role].url}/v1/completions", body)
        params = answer.get("kv_transfer_params")
    time.sleep(0.2)
    for node in nodes.values():
        os.kill(node.pid, signal.SIGUSR2)
    return [_read(folder / role) for role in nodes]


def _read(path: Path) -> SidePath:
    until = time.monotonic() + 30
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} was not written")
        time.sleep(0.01)
    rows = json.loads(path.read_text())
    return SidePath({(file, name): count for file, name, count in rows if not file.startswith(_LEFT_OUT)})


class Recorder:
    """Counts the calls of all threads that begin after it, and of this one, and writes them to a file."""

    def __init__(self, out: str) -> None:
        self._out = Path(out)
        self._is_on = False
        self._counts: dict[CodeType, int] = {}
        signal.signal(signal.SIGUSR1, self._begin)
        signal.signal(signal.SIGUSR2, self._end)
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and self._is_on:
            code = frame.f_code
            self._counts[code] = self._counts.get(code, 0) + 1

    def _begin(self, number: int, frame: FrameType | None) -> None:
        self._counts = {}
        self._is_on = True

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._is_on = False
        rows = [
            (code.co_filename.removeprefix(_PACKAGE), code.co_qualname, count)
            for code, count in self._counts.items()
            if code.co_filename.startswith(_PACKAGE)
        ]
        # Whole, or not there.
        part = self._out.with_suffix(".part")
        part.write_text(json.dumps(rows))
        part.rename(self._out)


def main(arguments: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for side, path in zip("PD", measure(Path(folder)), strict=True):
            print(side, str(path) if "--list" in arguments else str(path).partition("\n")[0])


if __name__ == "__main__":
    main(sys.argv[1:])
