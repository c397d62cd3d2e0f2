"""Runs the parts of a deployment on this machine: their commands, with addresses of this machine.

What is changed is only where they listen and what they are reached at. Which program stands behind
``vllm serve`` is the caller's choice.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvconnect.demo.http import BadAnswer, fetch
from kvconnect.peer.key_files import new_secret, write_once
from tests.deploy.commands import DEPLOY, Part

Server = Callable[[str, list[str]], tuple[list[str], dict[str, str]]]
"""From a part's name and its command to the command that is run here, and what its environment gets too."""

# The cards of this machine are not the deployment's.
_LOCAL = {"UCX_NET_DEVICES": "lo"}


@dataclass
class Running:
    """One process and where it is reached."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait_for(self, path: str, timeout_s: float) -> None:
        """Until ``path`` answers 200. Fails with the end of the log."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fetch(self.url + path, timeout_s=2)
                return
            except BadAnswer as error:
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
                assert self.process.poll() is None, f"{self.process.args} ended\n{tail}"
                assert time.monotonic() < deadline, f"{error}\n{tail}"
                time.sleep(0.2)

    def end(self) -> int:
        """SIGTERM, and SIGKILL if that does not help; the exit code. Idempotent."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
            try:
                return self.process.wait(60)
            except subprocess.TimeoutExpired:
                continue
        raise AssertionError(f"{self.process.args} does not end")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for made in sockets:
            made.bind(("127.0.0.1", 0))
        return [made.getsockname()[1] for made in sockets]


def localised(parts: dict[str, Part], folder: Path) -> dict[str, Part]:
    """The same parts, listening on and reached at free ports of this machine, with a key in ``folder``.

    The router's URLs are replaced whole, and only those that name a server of the deployment at the port
    that it listens on: a URL that leads nowhere there leads nowhere here.
    """
    ports = iter(free_ports(5))
    here: dict[str, Part] = {}
    replaced: dict[str, str] = {}
    for name in ("prefill", "decode"):
        part, port, config = parts[name], str(next(ports)), parts[name].transfer
        replaced.update({f"{url}:{part.option('--port')}": f"http://127.0.0.1:{port}" for url in part.urls})
        config["kv_connector_extra_config"].update(host="127.0.0.1", port=next(ports))
        if "key_file" in config["kv_connector_extra_config"]:
            config["kv_connector_extra_config"]["key_file"] = str(_key(folder))
        values = {"--host": "127.0.0.1", "--port": port, "--kv-transfer-config": json.dumps(config)}
        here[name] = Part(_with_values(part.command, values), part.environment, [f"http://127.0.0.1:{port}"])
    port = str(next(ports))
    command = _with_values(parts["router"].command, {"--host": "127.0.0.1", "--port": port})
    command = [_replace_url(word, replaced) for word in command]
    here["router"] = Part(command, parts["router"].environment, [f"http://127.0.0.1:{port}"])
    return here


def _key(folder: Path) -> Path:
    path = folder / "key"
    write_once(path, new_secret())
    return path


def _with_values(command: list[str], values: dict[str, str]) -> list[str]:
    """The options' values, replaced where the command gives them and added where it leaves them out."""
    left, made, words = dict(values), [], iter(command)
    for word in words:
        name, given, _ = word.partition("=")
        if name in left:
            made += [name, left.pop(name)]
            if not given:
                next(words)
        else:
            made.append(word)
    return made + [word for pair in left.items() for word in pair]


def _replace_url(word: str, replaced: dict[str, str]) -> str:
    option, given, value = word.rpartition("=")
    return option + given + replaced.get(value, value)


@contextmanager
def running(parts: dict[str, Part], server: Server, folder: Path) -> Iterator[dict[str, Running]]:
    """All three processes of ``localised`` parts, started and not awaited; ended with the block."""
    started: dict[str, Running] = {}
    try:
        for name, part in parts.items():
            command, more = part.command, {}
            if name != "router":
                command, more = server(name, command)
            elif command[0] == "kvconnect":
                command = [sys.executable, "-m", *command]
            wanted = {key: _LOCAL.get(key, value) for key, value in part.environment.items()}
            log = folder / f"{name}.log"
            with log.open("wb") as out:
                process = subprocess.Popen(
                    command,
                    env={**os.environ, "PYTHONPATH": str(DEPLOY.parent), **wanted, **more},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
            started[name] = Running(part.urls[0], process, log)
        yield started
    finally:
        _end_all(started.values())


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """In the child: end too if the tests themselves are killed, and cannot end it."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_all(started: Iterable[Running]) -> None:
    for one in started:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGTERM)
    for one in started:
        one.end()
