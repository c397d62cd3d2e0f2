"""The commands that the deployment files would run, read from the files themselves.

Every kind of deployment is turned into the same thing: three parts, each with the argument list that its
executable would get and the environment that its file sets. Compose's and Kubernetes' variables are put in
here; what is left to a shell is run by a shell, with an executable that only says what it was given.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
KINDS = ("compose", "kubernetes", "systemd")
WITH_README = (*KINDS, "readme")
POD_IPS = {"prefill": "198.51.100.21", "decode": "2001:db8::22"}

_COMPOSE_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?::-([^}]*))?\})")
_KUBERNETES_VARIABLE = re.compile(r"\$(?:(\$)|\(([^)]*)\))")
_SYSTEMD_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)\})")


@dataclass
class Part:
    """One process of a deployment. ``command`` is the whole command, the executable included."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    urls: list[str] = field(default_factory=list)
    """Where the router would reach its servers, without the port."""

    @property
    def options(self) -> dict[str, list[str]]:
        """The options by name, each with all values given to it."""
        found: dict[str, list[str]] = {}
        words = iter(self.command)
        for word in words:
            if word.startswith("--"):
                name, given, value = word.partition("=")
                found.setdefault(name, []).append(value if given else next(words))
        return found

    def option(self, name: str) -> str:
        """The one value of an option that is given once."""
        (value,) = self.options[name]
        return value

    @property
    def transfer(self) -> dict[str, Any]:
        """The ``kv_transfer_config``, not checked."""
        config: dict[str, Any] = json.loads(self.option("--kv-transfer-config"))
        return config


Settings = Mapping[str, str]
"""Values for what a user of the files sets, such as MODEL; the files' own values where it has none."""


def deployment(kind: str, folder: Path, settings: Settings = MappingProxyType({})) -> dict[str, Part]:
    """The parts ``prefill``, ``decode`` and ``router`` of one kind; ``folder`` is for scratch files."""
    if kind == "readme":
        return readme(folder)
    return {"compose": compose, "kubernetes": kubernetes, "systemd": systemd}[kind](folder, settings)


# --- compose --------------------------------------------------------------------------------------


def compose_file(settings: Settings = MappingProxyType({})) -> dict[str, Any]:
    """The compose file, with every other variable at its default."""

    def put_in(value: Any) -> Any:
        if isinstance(value, str):
            return _COMPOSE_VARIABLE.sub(lambda m: m[1] or settings.get(m[2], m[3] or ""), value)
        if isinstance(value, dict):
            return {key: put_in(inner) for key, inner in value.items()}
        return [put_in(inner) for inner in value] if isinstance(value, list) else value

    read: dict[str, Any] = put_in(yaml.safe_load((DEPLOY / "compose.yaml").read_text()))
    return read


def compose(folder: Path, settings: Settings) -> dict[str, Part]:
    parts = {}
    for name, service in compose_file(settings)["services"].items():
        environment = {k: str(v) for k, v in service.get("environment", {}).items() if v is not None}
        mounts = [volume.split(":") for volume in service.get("volumes", [])]
        files = {inside: DEPLOY / outside for outside, inside, *_ in mounts if outside.endswith(".json")}
        command = [*service.get("entrypoint", []), *service["command"]]
        parts[name] = Part(_said(command, environment, files, folder), environment, [f"http://{name}"])
    return parts


# --- Kubernetes -----------------------------------------------------------------------------------

RELEASE, NAMESPACE = "kvconnect", "inference"


def tool(name: str) -> str:
    """A program that deploy/ is checked with: the system's, or what `make setup` put into the environment."""
    ours = DEPLOY.parent / ".venv"
    path = os.pathsep.join((os.environ["PATH"], str(ours / "bin"), str(ours / "prometheus/usr/bin")))
    found = shutil.which(name, path=path)
    if not found:
        pytest.skip(f"{name} is not installed here; make setup gets it where a package has it")
    return found


def helm(*arguments: str | Path, values: Mapping[str, Any] = MappingProxyType({})) -> str:
    """What ``helm`` prints with these values. Raises ``CalledProcessError``."""
    command = [tool("helm"), *map(str, arguments), "--namespace", NAMESPACE, "--values", "-"]
    run = subprocess.run(
        command, input=json.dumps(dict(values)), capture_output=True, text=True, check=True, timeout=60
    )
    return run.stdout


def chart(values: Mapping[str, Any] = MappingProxyType({})) -> list[dict[str, Any]]:
    """Every object that the chart makes of these values."""
    return list(yaml.safe_load_all(helm("template", RELEASE, DEPLOY / "helm", values=values)))


def named(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """The one object of that kind and name."""
    (found,) = (o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, f"{RELEASE}-{name}"))
    return found


def kubernetes(_folder: Path, settings: Settings) -> dict[str, Part]:
    values: dict[str, Any] = {"args": settings.get("SERVE_ARGS", "").split()}
    if "MODEL" in settings:
        values["model"] = settings["MODEL"]
    objects = chart(values)
    parts = {}
    for name in ("prefill", "decode", "router"):
        pod = named(objects, "Deployment", name)["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        environment = {}
        for variable in container.get("env", []):
            if "value" in variable:
                environment[variable["name"]] = variable["value"]
            elif "fieldRef" in variable["valueFrom"]:
                assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
                environment[variable["name"]] = POD_IPS[name]
        command = [_kubernetes_text(word, environment) for word in container["command"] + container["args"]]
        service = named(objects, "Service", name)
        scheme = "dns+http" if service["spec"].get("clusterIP") == "None" else "http"
        parts[name] = Part(command, environment, [f"{scheme}://{service['metadata']['name']}"])
    return parts


def _kubernetes_text(text: str, environment: dict[str, str]) -> str:
    """``$(NAME)`` is a variable if there is one of that name, and stays as it is otherwise."""
    return _KUBERNETES_VARIABLE.sub(lambda m: m[1] or environment.get(m[2], m[0]), text)


# --- systemd --------------------------------------------------------------------------------------


def unit_settings(name: str) -> dict[str, list[str]]:
    """The settings of a unit file, each with all values it is given."""
    text = (DEPLOY / "systemd" / name).read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and line[0] not in "#;[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def systemd(folder: Path, settings: Settings) -> dict[str, Part]:
    parts = {}
    for name, unit in (
        ("prefill", "kvconnect-vllm@.service"),
        ("decode", "kvconnect-vllm@.service"),
        ("router", "kvconnect-router.service"),
    ):
        unit_says = unit_settings(unit)
        (path,) = unit_says["EnvironmentFile"]
        path = path.replace("%i", name)
        assert Path(path).parent == Path("/etc/kvconnect")
        environment = _environment_file(DEPLOY / "systemd" / Path(path).name)
        environment = {key: settings.get(key, value) for key, value in environment.items()}
        (start,) = unit_says["ExecStart"]
        command = []
        for word in shlex.split(start):
            if re.fullmatch(r"\$\w+", word):
                command += environment.get(word[1:], "").split()
            else:
                command.append(
                    _SYSTEMD_VARIABLE.sub(lambda m, env=environment: m[1] or env.get(m[2], ""), word)
                )
        assert Path(command[0]).parent == Path("/opt/kvconnect/bin")
        command[0] = Path(command[0]).name
        parts[name] = Part(command, environment, [f"http://{environment['HTTP_HOST']}"])
    return parts


def _environment_file(path: Path) -> dict[str, str]:
    """What an environment file sets. What is quoted there means the same to a shell."""
    script = 'set -a; . "$1"; exec env -0'
    run = subprocess.run(
        ["env", "-i", "sh", "-c", script, "sh", path], capture_output=True, text=True, check=True, timeout=20
    )
    pairs = [line.split("=", 1) for line in run.stdout.split("\0") if line]
    return {key: value for key, value in pairs if key not in ("PWD", "OLDPWD", "SHLVL", "_")}


# --- the example by hand --------------------------------------------------------------------------


def readme(folder: Path) -> dict[str, Part]:
    """The pair of ``kvconnect serve`` at the beginning of deploy/README.md."""
    text = (DEPLOY / "README.md").read_text()
    parts = {}
    for script in re.findall(r"^    (kvconnect (?:serve|router) (?:.*\\\n)*.*)$", text, re.MULTILINE):
        command = _said(["sh", "-c", f"cd '{DEPLOY.parent}' && {script}"], {}, {}, folder)
        part = Part(command)
        name = "router"
        if command[1] == "serve":
            name = {"kv_producer": "prefill", "kv_consumer": "decode"}[part.transfer["kv_role"]]
            part.urls.append(f"http://{part.option('--host')}")
        assert name not in parts, f"deploy/README.md has two commands of a {name}"
        parts[name] = part
    return parts


# --- the shell's part -----------------------------------------------------------------------------


def _said(command: list[str], environment: dict[str, str], files: dict[str, Path], folder: Path) -> list[str]:
    """What the executable at the end of a shell's command would be given."""
    if command[0] != "sh":
        return command
    binaries = folder / "say"
    binaries.mkdir(exist_ok=True)
    for name in ("vllm", "kvconnect"):
        say = binaries / name
        say.write_text('#!/bin/sh\nprintf "%s\\0" "${0##*/}" "$@"\n')
        say.chmod(0o755)
    for inside, outside in files.items():
        command = [word.replace(inside, str(outside)) for word in command]
    run = subprocess.run(
        command,
        env={**environment, "PATH": f"{binaries}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    return run.stdout.split("\0")[:-1]
