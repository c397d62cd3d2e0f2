"""What this machine has, as far as KV on its way depends on it. Only looks; judges nothing.

Everything below ``/sys``, ``/proc`` and ``/dev`` is read under a root that is an argument.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvconnect.engine.cuda_driver import supports_dmabuf
from kvconnect.errors import EngineError
from kvconnect.packages import package_versions

VARIABLES = ("UCX_", "MC_", "NIXL_", "VLLM_", "PYTORCH_", "CUDA_VISIBLE_DEVICES")
"""How the names begin of what libraries take from the environment."""
_CAP_IPC_LOCK = 14
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_TOPOLOGY_TIMEOUT_S = 10


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA device. ``numa_node`` is -1 where the machine does not report it."""

    device: str
    port: int
    state: str
    rate: str
    link_layer: str
    numa_node: int


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees. ``peers`` are those whose memory it can access; ``has_dmabuf``: RDMA without a
    kernel module."""

    index: int
    name: str
    numa_node: int
    has_dmabuf: bool
    peers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was found. Limits are in bytes or numbers, None for none; ``links`` are GPUs' to each other,
    ``speeds`` those of network interfaces in Mb/s."""

    versions: Mapping[str, str] = field(default_factory=dict)
    rdma: tuple[RdmaPort, ...] = ()
    has_verbs: bool = True
    has_peermem: bool = False
    has_nvidia_driver: bool = False
    speeds: Mapping[str, int] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)
    compiler: str = ""
    memlock_bytes: int | None = None
    may_lock: bool = False
    open_files: int | None = None
    shm_bytes: int = 0
    shm_free_bytes: int = 0
    available_bytes: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)


def look(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Machine:
    """Look at this machine. What cannot be read is left at what a machine without it would have."""
    infiniband = root / "sys/class/infiniband"
    devices = sorted(infiniband.iterdir()) if infiniband.is_dir() else []
    shm = os.statvfs(root / "dev/shm") if (root / "dev/shm").is_dir() else None
    memlock, files = (
        resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)
    )
    capabilities = _field(root / "proc/self/status", "CapEff", "0")
    available = _field(root / "proc/meminfo", "MemAvailable", "0 kB")
    gpus = _gpus(root)
    return Machine(
        versions=package_versions(),
        rdma=tuple(port for device in devices for port in _ports(device)),
        has_verbs=any((root / "dev/infiniband").glob("uverbs*")),
        has_peermem="nvidia_peermem" in _read(root / "proc/modules"),
        has_nvidia_driver=(root / "proc/driver/nvidia/version").exists(),
        speeds=_speeds(root / "sys/class/net"),
        gpus=gpus,
        links=_gpu_links() if len(gpus) > 1 else {},
        compiler=next(filter(None, map(shutil.which, (environ.get("CC", ""), "gcc", "clang", "cc"))), ""),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        may_lock=bool(int(capabilities, 16) >> _CAP_IPC_LOCK & 1),
        open_files=None if files == resource.RLIM_INFINITY else files,
        shm_bytes=shm.f_frsize * shm.f_blocks if shm else 0,
        shm_free_bytes=shm.f_frsize * shm.f_bavail if shm else 0,
        available_bytes=int(available.split()[0]) << 10,
        # Others hold secrets.
        environ={name: value for name, value in environ.items() if name.startswith(VARIABLES)},
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _field(path: Path, name: str, default: str) -> str:
    found = re.search(rf"^{name}:\s*(\S.*)$", _read(path), re.M)
    return found[1] if found else default


def _numa_node(device: Path) -> int:
    text = _read(device / "numa_node")
    return int(text) if text.lstrip("-").isdecimal() else -1


def _ports(device: Path) -> list[RdmaPort]:
    return [
        RdmaPort(
            device.name,
            int(port.name),
            # As "4: ACTIVE".
            _read(port / "state").rpartition(":")[2].strip(),
            _read(port / "rate"),
            _read(port / "link_layer"),
            _numa_node(device / "device"),
        )
        for port in sorted((device / "ports").glob("[0-9]*"))
    ]


def _speeds(interfaces: Path) -> dict[str, int]:
    """Those of interfaces that have a speed; virtual ones have none, or -1."""
    texts = {path.parent.name: _read(path) for path in interfaces.glob("*/speed")}
    return {name: int(text) for name, text in texts.items() if text.isdecimal()}


def _gpus(root: Path) -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    count, found = torch.cuda.device_count(), []
    for index in range(count):
        properties: Any = torch.cuda.get_device_properties(index)
        # Older torch does not say where a GPU is.
        numbers = [getattr(properties, f"pci_{name}_id", 0) for name in ("domain", "bus", "device")]
        place = "{:04x}:{:02x}:{:02x}.0".format(*numbers)
        try:
            has_dmabuf = supports_dmabuf(index)
        except EngineError:
            has_dmabuf = False
        found.append(
            Gpu(
                index,
                properties.name,
                _numa_node(root / "sys/bus/pci/devices" / place),
                has_dmabuf,
                tuple(
                    other
                    for other in range(count)
                    if other != index and torch.cuda.can_device_access_peer(index, other)
                ),
            )
        )
    return tuple(found)


def _gpu_links() -> dict[tuple[int, int], str]:
    """How GPUs are linked, in the words of ``nvidia-smi topo -m``; nothing without it."""
    if shutil.which("nvidia-smi") is None:
        return {}
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=_TOPOLOGY_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return read_topology(done.stdout)


def read_topology(text: str) -> dict[tuple[int, int], str]:
    """The links between GPUs of the matrix that ``nvidia-smi topo -m`` prints."""
    lines = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    header = next((line for line in lines if line and line[0] == "GPU0" and "X" not in line), [])
    links = {}
    for line in lines:
        if line and line[0].startswith("GPU") and line is not header:
            for column, cell in zip(header, line[1:], strict=False):
                if column.startswith("GPU") and cell != "X" and column[3:].isdecimal():
                    links[int(line[0][3:]), int(column[3:])] = cell
    return links
