"""What measurements of real vLLM pairs share: how they are connected, started, ended and told of."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar

from tests.ports import free_port
from tests.vllm import dense_model, tiny_models
from tests.vllm.servers import MULTIPROCESSING, NIXL_CONNECTOR, ROOT, Server, running, transfer_config
from tests.vllm.tiny_models import Recipe


class Together(Protocol):
    """Servers of which one is of no use without the others."""

    @property
    def name(self) -> str: ...

    @property
    def servers(self) -> Sequence[Server]: ...


T = TypeVar("T", bound=Together)


@dataclass(frozen=True)
class Variant:
    """What a pair is connected with: ``extra`` for kvconnect, None for vLLM's own NixlConnector."""

    name: str
    extra: Mapping[str, Any] | None

    def config(self, role: str) -> dict[str, Any]:
        """The ``kv_transfer_config`` of a ``producer`` or ``consumer``."""
        if self.extra is None:
            return NIXL_CONNECTOR
        return transfer_config(role, **{"engine": "nixl", "protocol": "auto", **self.extra})


NIXL = Variant("NixlConnector", None)


@dataclass
class Pair:
    """A prefill and a decode server that are up."""

    variant: Variant
    prefill: Server
    decode: Server

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def servers(self) -> tuple[Server, Server]:
        return self.prefill, self.decode


class Lines:
    """JSON lines on standard output unless they are not shown, and in a file if there is one."""

    def __init__(self, copy: TextIO | None = None, is_shown: bool = True) -> None:
        self._copy = copy
        self._is_shown = is_shown

    def write(self, kind: str, **finding: Any) -> None:
        """Tell one finding."""
        line = json.dumps({"kind": kind, **finding})
        if self._is_shown:
            print(line, flush=True)
        if self._copy is not None:
            print(line, file=self._copy, flush=True)


@contextmanager
def prepared(
    given: argparse.Namespace,
    gpu: str,
    *,
    tiny: str = "heavy",
    shape: dense_model.Shape | None = None,
    is_shown: bool = True,
) -> Iterator[tuple[Recipe, Path, Lines]]:
    """What a measurement begins with by its ``--cpu``, ``--model``, ``--logs`` and ``--json``: the model, the
    folder of logs, and where findings are told. ``tiny`` is the model of a CPU, ``shape`` that of a GPU."""
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lines = Lines(stack.enter_context(given.json.open("a")) if given.json else None, is_shown)
        if given.cpu:
            recipe = tiny_models.write_model(tiny, temporary)
        else:
            where = given.model or temporary / "model"
            recipe = dense_model.write_model(where, shape or dense_model.Shape(), f"cuda:{gpu}")
        logs = given.logs or temporary
        logs.mkdir(parents=True, exist_ok=True)
        yield recipe, logs, lines


def named_variant(named: str, extra: Mapping[str, Any]) -> Variant:
    """kvconnect over an engine, or ``engine:protocol``."""
    engine, _, protocol = named.partition(":")
    settings = {"engine": engine, "protocol": protocol or "auto", **extra}
    return Variant("-".join(filter(None, ("kvconnect", engine, protocol))), settings)


def gpu_options(
    chunk: int, kv_gib: int, block_size: int = 16, attention_backend: str = "FLASH_ATTN"
) -> list[str]:
    """What servers on GPUs are started with."""
    options = ["--attention-backend", attention_backend, "--block-size", str(block_size)]
    options += ["--max-num-batched-tokens", str(chunk)]
    # Said in bytes: servers that start at the same time would count each other's memory. The other one
    # is only compared with what is free at the start.
    return [*options, "--kv-cache-memory-bytes", str(kv_gib << 30), "--gpu-memory-utilization", "0.1"]


def environment(gpu: str | None, settings: Sequence[str] = ()) -> dict[str, str | None]:
    """What a server's environment differs by; ``settings`` are ``NAME=VALUE``, ``gpu`` None on a CPU."""
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        # Measured is what operators run.
        MULTIPROCESSING: None,
        **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
        **dict(setting.split("=", 1) for setting in settings),
    }


@contextmanager
def brought_up(started: Sequence[T], lines: Lines) -> Iterator[list[T]]:
    """Those that come up; what the others said is told. All servers are ended in the end."""
    with ExitStack() as stack:
        up = []
        # Before any of them is waited for: what comes next may fail.
        for one in started:
            for server in reversed(one.servers):
                stack.callback(server.end)
        for one in started:
            try:
                stack.enter_context(running(*one.servers))
            except Exception:
                tell_failure(one, lines)
                continue
            up.append(one)
        yield up


def tell_failure(one: Together, lines: Lines) -> None:
    """Tell the exception under way, and show the logs."""
    tails = {server.name: server.tail() for server in one.servers}
    lines.write("failure", connector=one.name, error=traceback.format_exc(limit=-3)[-3000:])
    for name, tail in tails.items():
        print(f"--- log of {name}:\n{tail}", flush=True)
