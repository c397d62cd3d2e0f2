"""Runs the parts of a deployment on this machine: their commands, with addresses of this machine.

What is changed is only where they listen and what they are reached at. Which program stands behind
``vllm serve`` is the caller's choice.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvconnect.node.children import Child, Children
from kvconnect.peer.keyring import new_secret, write
from kvconnect.router.router_options import NAME
from tests.deploy.commands import DEPLOY, Part
from tests.ports import free_port

Server = Callable[[str, list[str]], tuple[list[str], dict[str, str]]]
"""From a part's name and its command to the command that is run here, and what its environment gets too."""

# The cards of this machine are not the deployment's.
_LOCAL = {"UCX_NET_DEVICES": "lo"}
END_TIMEOUT_S = 60.0


def localised(parts: dict[str, Part], folder: Path) -> dict[str, Part]:
    """The same parts, listening on and reached at free ports of this machine, with a key in ``folder``.

    The router's URLs are replaced whole, and only those that name a server of the deployment at the port
    that it listens on: a URL that leads nowhere there leads nowhere here.
    """
    key = folder / "key"
    write(key, new_secret())
    here: dict[str, Part] = {}
    replaced: dict[str, str] = {}
    for name in ("prefill", "decode"):
        part, port, config = parts[name], str(free_port()), parts[name].transfer
        for url in part.urls:
            # A name stays one that the router looks up.
            looked_up = NAME if url.startswith(NAME) else ""
            replaced[f"{url}:{part.option('--port')}"] = f"{looked_up}http://127.0.0.1:{port}"
        config["kv_connector_extra_config"].update(host="127.0.0.1", port=free_port())
        if "key_file" in config["kv_connector_extra_config"]:
            config["kv_connector_extra_config"]["key_file"] = str(key)
        values = {"--host": "127.0.0.1", "--port": port, "--kv-transfer-config": json.dumps(config)}
        here[name] = Part(_with_values(part.command, values), part.environment, [f"http://127.0.0.1:{port}"])
    port = str(free_port())
    command = _with_values(parts["router"].command, {"--host": "127.0.0.1", "--port": port})
    command = [_replace_url(word, replaced) for word in command]
    here["router"] = Part(command, parts["router"].environment, [f"http://127.0.0.1:{port}"])
    return here


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
def running(parts: dict[str, Part], server: Server, folder: Path) -> Iterator[dict[str, Child]]:
    """All three processes of ``localised`` parts, started and not awaited; ended with the block."""
    with Children(folder) as children:
        started: dict[str, Child] = {}
        try:
            for name, part in parts.items():
                command, more = part.command, {}
                if name != "router":
                    command, more = server(name, command)
                elif command[0] == "kvconnect":
                    command = [sys.executable, "-m", *command]
                wanted = {key: _LOCAL.get(key, value) for key, value in part.environment.items()}
                environment = {"PYTHONPATH": str(DEPLOY.parent), **wanted, **more}
                child = Child(name, command, folder / f"{name}.log", environment, part.urls[0])
                started[name] = children.add(child)
            yield started
        finally:
            children.end(END_TIMEOUT_S)
