"""What carries bytes to a peer, and how fast that should be: by an engine's words, and by what was seen.

UCX chooses a transport for each peer and reports it nowhere but on standard output. So the system's counters
are read before and after a calibration: those of this process's TCP connections, and of the RDMA ports. What
neither of the two carried is deduced, and named as that.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kvconnect.config import LaneKind
from kvconnect.engine.fabric import Fabric, read_text
from kvconnect.engine.interfaces import interface_of

K = TypeVar("K")

logger = logging.getLogger(__name__)

LEAST_SHARE = 0.5
"""Of the rate that the hardware should give: what is less is worth a warning."""
_NVLINK_BYTES_PER_S = 25e9
"""One link of any generation since Volta, each way."""
_FASTEST_PCIE_BYTES_PER_S = 64e9
"""Sixteen lanes of the fifth generation: what GPUs of one host exchange faster goes over NVLink."""
_ALL_OF = 0.9
"""What grew by this part of what was moved has carried it: the last bytes may not be acknowledged."""
_ABOUT = 1.5
"""What grew by no more than this part of it carried little else: headers, and the side channel."""
_MOST_DESCRIPTORS = 1000
_ACKED_AT = 120
"""Where ``tcpi_bytes_acked`` lies in Linux's ``tcp_info``."""
_UCX_WRITE = "remote memory write by ucp_put"
_UCX_CELLS = re.compile(r"\|([^|]+)\|([^|]+)\|([^|]+)\|\s*$")
_WORDS: tuple[tuple[LaneKind, str], ...] = (
    ("nvlink", "nvlink"),
    ("cuda_ipc", "cuda_ipc"),
    ("tcp", r"\btcp"),
    ("rdma", r"rdma|\b(rc|ud|dc|ib|gga|srd)(_\w+)?/"),
    ("shared_memory", r"\b(cma|sysv|posix|xpmem|memory|self)\b"),
)


@dataclass(frozen=True)
class Lane:
    """What carries bytes; ``device`` where that is known. ``known_by`` is empty for the engine's own word."""

    kind: LaneKind = "unknown"
    device: str = ""
    known_by: str = ""

    def __str__(self) -> str:
        known = "; ".join(filter(None, (self.device, self.known_by)))
        return f"{self.kind} ({known})" if known else self.kind


@dataclass(frozen=True)
class Traffic:
    """Bytes that left so far: over this process's TCP connections, by local and remote host, and by port.

    Those of an RDMA port are of the whole machine.
    """

    tcp: dict[tuple[str, str], int] = field(default_factory=dict)
    rdma: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """A calibration as the system saw it: what it moved, how fast, whereto, and the counters around it."""

    total_bytes: int
    bytes_per_s: float
    host: str
    is_near: bool
    on_gpu: bool
    before: Traffic
    after: Traffic


def lane_of(words: str) -> Lane:
    """The lane that an engine or UCX names, as of "tcp/eth0", "rdma mlx5_0" or "cuda_ipc/cuda"."""
    if words.startswith("UCX"):
        # What it was configured with, perhaps to exclude that: not what it takes for a peer.
        return Lane()
    found = (kind for kind, pattern in _WORDS if re.search(pattern, words.lower()))
    kind: LaneKind = next(found, "unknown")
    _, _, device = words.partition("/") if "/" in words else words.partition(" ")
    return Lane(kind, device if kind in ("tcp", "rdma") else "")


def wire_of(lines: list[str]) -> str:
    """What UCX writes a large piece over, of the tables that it prints; empty where it printed none."""
    found, is_write = "", False
    for line in lines:
        if " by ucp_" in line:
            is_write = _UCX_WRITE in line
        elif is_write and (cells := _UCX_CELLS.search(line)) and "inf" in cells[1]:
            found = cells[3].strip()
    return found


def seen_lane(reported: Lane, seen: Seen, fabric: Fabric) -> Lane:
    """The lane of a calibration. What was seen on TCP counts for more than what the engine reports.

    Counters also hold what was sent to others meanwhile. So one that grew by about as much as was moved is
    believed; one that grew by more is so only where nothing else explains the bytes.
    """
    if not seen.total_bytes or not any(seen.before.tcp.values()) or not any(seen.after.tcp.values()):
        # Without counters nothing can be excluded. The side channel alone has a connection that grows.
        return reported
    needed = _ALL_OF * seen.total_bytes
    carried, ports = _growth(seen.before.tcp, seen.after.tcp), _growth(seen.before.rdma, seen.after.rdma)
    to_peer = {local: count for (local, remote), count in carried.items() if remote == _plain(seen.host)}
    if sum(to_peer.values()) >= needed:
        return Lane("tcp", interface_of(max(to_peer, key=lambda local: to_peer[local])), "observed")
    if reported.kind != "unknown":
        return reported
    memory = _memory_lane(seen)
    if memory.kind == "nvlink":
        return memory
    used = ",".join(sorted(port for port, count in ports.items() if count >= needed / len(ports)))
    rdma = Lane("rdma", used, "deduced: by the ports' counters")
    most, _ = expected_rate(fabric, rdma)
    tcp = Lane("tcp", known_by="deduced: other connections carried as much meanwhile")
    grown = [(tcp, sum(carried.values()))]
    if not most or seen.bytes_per_s <= most:
        grown.insert(0, (rdma, sum(ports.values())))
    fitting = [(lane, count) for lane, count in grown if count >= needed]
    for lane, count in fitting:
        if count <= _ABOUT * seen.total_bytes:
            return lane
    lanes = [lane for lane, _ in fitting] + [memory] * (memory.kind != "unknown")
    if len(lanes) > 1:
        kinds = " or ".join(lane.kind for lane in lanes)
        return Lane(known_by=f"{kinds}: others sent so much meanwhile that each is possible")
    return lanes[0] if lanes else reported


def _memory_lane(seen: Seen) -> Lane:
    """What carries bytes within a host that no network carries; unknown for a host that is far."""
    if not seen.is_near:
        return Lane()
    if not seen.on_gpu:
        return Lane("shared_memory", known_by="deduced: no network carried it")
    kind: LaneKind = "nvlink" if seen.bytes_per_s > _FASTEST_PCIE_BYTES_PER_S else "cuda_ipc"
    return Lane(kind, known_by="deduced: by its rate, and no network carried it")


def expected_rate(fabric: Fabric, lane: Lane, copy_bytes_per_s: float = 0.0) -> tuple[float, str]:
    """What a lane should give in bytes a second, and why; 0 where that is not known.

    ``copy_bytes_per_s`` is that of a plain copy within a process, and the most that shared memory gives.
    """
    links = [int(link[2:]) for link in fabric.links.values() if re.fullmatch(r"NV\d+", link)]
    if links and lane.kind in ("nvlink", "cuda_ipc"):
        return max(links) * _NVLINK_BYTES_PER_S, f"NV{max(links)}"
    if lane.kind == "rdma" and (active := fabric.active_ports):
        devices = {name.partition(":")[0] for name in lane.device.split(",")}
        named = [port for port in active if port.device in devices] or active[:1]
        shown = ", ".join(f"{port.device}, {port.rate}" for port in named)
        return sum(port.bytes_per_s for port in named), shown
    if lane.kind == "tcp" and (speed := fabric.speeds.get(lane.device)):
        return speed * 1e6 / 8, f"{lane.device}, {speed} Mb/s"
    if lane.kind == "shared_memory":
        return copy_bytes_per_s, "a plain copy of memory"
    return 0.0, f"nothing known of {lane.kind}{'/' * bool(lane.device)}{lane.device}"


def look_at_traffic(root: Path = Path("/")) -> Traffic:
    """Read the counters; none where they cannot be read. Takes up to 25 us for each descriptor."""
    try:
        rdma = {}
        for port in (root / "sys/class/infiniband").glob("*/ports/[0-9]*"):
            # In words of four bytes; EFA has bytes, elsewhere.
            words, own = read_text(port / "counters/port_xmit_data"), read_text(port / "hw_counters/tx_bytes")
            sent = 4 * int(words) if words.isdecimal() else int(own or 0)
            rdma[f"{port.parents[1].name}:{port.name}"] = sent
        return Traffic(_tcp_traffic(), rdma)
    except Exception as error:
        logger.debug("the system's counters cannot be read: %r", error)
        return Traffic()


def _tcp_traffic() -> dict[tuple[str, str], int]:
    """What this process's connections sent; nothing where they may be too many to look at."""
    tcp: dict[tuple[str, str], int] = {}
    names = os.listdir("/proc/self/fd")
    for name in names if len(names) <= _MOST_DESCRIPTORS else ():
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                # A descriptor of our own: its owner, a library, may close the other one at any time.
                own = os.dup(int(name))
                try:
                    _add_tcp(tcp, own)
                finally:
                    os.close(own)
        except (OSError, struct.error):
            continue
    return tcp


def _add_tcp(tcp: dict[tuple[str, str], int], descriptor: int) -> None:
    # Called non-blocking, whether it is or not, Python leaves its mode alone, which its owner's has too.
    found = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=descriptor)
    try:
        if found.family not in (socket.AF_INET, socket.AF_INET6):
            return
        # Of what is no TCP connection this is an OSError.
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        between = _plain(found.getsockname()[0]), _plain(found.getpeername()[0])
    finally:
        found.detach()
    tcp[between] = tcp.get(between, 0) + int(struct.unpack_from("Q", info, _ACKED_AT)[0])


def _growth(before: dict[K, int], after: dict[K, int]) -> dict[K, int]:
    """What grew. A connection that was closed meanwhile takes nothing away."""
    return {key: count - before.get(key, 0) for key, count in after.items() if count > before.get(key, 0)}


def _plain(host: str) -> str:
    """A host as text that can be compared: IPv4 where IPv6 stands for it, and without its zone."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)
