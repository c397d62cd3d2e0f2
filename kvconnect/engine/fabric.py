"""What joins this machine to others, and its GPUs to each other. Only looks; judges nothing.

Everything below ``/sys`` is read under a root that is an argument.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ACTIVE = "ACTIVE"
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

    @property
    def bytes_per_s(self) -> float:
        """Its rate, as of "400 Gb/sec (4X NDR)"; 0 where it is not known."""
        found = re.match(r"[\d.]+", self.rate)
        return float(found[0]) * 1e9 / 8 if found else 0.0


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """``links`` are GPUs' to each other, ``speeds`` those of network interfaces in Mb/s."""

    rdma: tuple[RdmaPort, ...] = ()
    speeds: Mapping[str, int] = field(default_factory=dict)
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)

    @property
    def active_ports(self) -> list[RdmaPort]:
        """The RDMA ports that have a link."""
        return [port for port in self.rdma if port.state == ACTIVE]


def look_at_fabric(root: Path = Path("/"), *, with_gpus: bool) -> Fabric:
    """Look at this machine; at links of GPUs only if asked, which takes a second."""
    infiniband = root / "sys/class/infiniband"
    devices = sorted(infiniband.iterdir()) if infiniband.is_dir() else []
    return Fabric(
        rdma=tuple(port for device in devices for port in _ports(device)),
        speeds=_speeds(root / "sys/class/net"),
        links=_gpu_links() if with_gpus else {},
    )


def read_text(path: Path) -> str:
    """A file of the system, empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def numa_node(device: Path) -> int:
    """The node of a device, -1 where the machine does not report it."""
    text = read_text(device / "numa_node")
    return int(text) if text.lstrip("-").isdecimal() else -1


def _ports(device: Path) -> list[RdmaPort]:
    return [
        RdmaPort(
            device.name,
            int(port.name),
            # As "4: ACTIVE".
            read_text(port / "state").rpartition(":")[2].strip(),
            read_text(port / "rate"),
            read_text(port / "link_layer"),
            numa_node(device / "device"),
        )
        for port in sorted((device / "ports").glob("[0-9]*"))
    ]


def _speeds(interfaces: Path) -> dict[str, int]:
    """Those of interfaces that have a speed; virtual ones have none, or -1."""
    texts = {path.parent.name: read_text(path) for path in interfaces.glob("*/speed")}
    return {name: int(text) for name, text in texts.items() if text.isdecimal()}


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
