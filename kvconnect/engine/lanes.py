"""What carries bytes to a peer, and how fast that should be.

UCX chooses a transport for each peer and reports it nowhere but on standard output. So the system's counters
are read before and after a calibration: those of this process's TCP connections, and of the RDMA ports. What
neither of the two carried is deduced, and named as that. All below ``/sys`` is read under a root that is an
argument.
"""

from __future__ import annotations

import ipaddress
import itertools
import logging
import os
import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from kvconnect.addresses import interface_of
from kvconnect.config import LaneKind

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
ACTIVE = "ACTIVE"
_ACKED_AT = 120
"""Where ``tcpi_bytes_acked`` lies in Linux's ``tcp_info``."""
MOST_BYTES_PER_S = 1e15
MOST_TEXT = 256
BytesPerSecond = Annotated[float, msgspec.Meta(ge=0, le=MOST_BYTES_PER_S)]
_PRINTABLE = r"^[ -~]*\Z"
"""It is shown in logs."""
Text = Annotated[str, msgspec.Meta(max_length=MOST_TEXT, pattern=_PRINTABLE)]
_UCX_WRITE = "remote memory write by ucp_put"
_UCX_CELLS = re.compile(r"\|([^|]+)\|([^|]+)\|([^|]+)\|\s*$")
_WORDS: tuple[tuple[LaneKind, str], ...] = (
    ("nvlink", "nvlink"),
    ("cuda_ipc", "cuda_ipc"),
    ("tcp", r"\btcp"),
    ("rdma", r"rdma|\b(rc|ud|dc|ib|gga|srd)(_\w+)?/"),
    ("shared_memory", r"\b(cma|sysv|posix|xpmem|memory|self)\b"),
)


class Transport(msgspec.Struct, frozen=True, array_like=True, tag="transport"):
    """P to D, once a connection and before the first fetch is served: what carries bytes, and how fast.

    ``bytes_per_s`` is what P's calibration reached, 0 where there was none; ``expected_bytes_per_s`` what the
    hardware should give, 0 where that is not known. ``known_by`` is empty for the engine's own word.
    ``refusal`` is why P will send nothing, by its own settings.
    """

    lane: LaneKind = "unknown"
    device: Text = ""
    known_by: Text = ""
    bytes_per_s: BytesPerSecond = 0.0
    expected_bytes_per_s: BytesPerSecond = 0.0
    refusal: Annotated[str, msgspec.Meta(max_length=4096, pattern=_PRINTABLE)] = ""

    @property
    def name(self) -> str:
        """The lane alone, with its device and how it is known."""
        known = "; ".join(filter(None, (self.device, self.known_by)))
        return f"{self.lane} ({known})" if known else self.lane

    @property
    def share(self) -> float:
        """Of the expected rate; 1 where either is not known."""
        known = self.bytes_per_s and self.expected_bytes_per_s
        return self.bytes_per_s / self.expected_bytes_per_s if known else 1.0

    def __str__(self) -> str:
        found = self.name
        if not self.bytes_per_s:
            return f"{found}, at a rate that was not measured"
        found += f", at {self.bytes_per_s / 1e9:.3g} GB/s"
        if not self.expected_bytes_per_s:
            return found
        return f"{found}, {self.share:.0%} of the {self.expected_bytes_per_s / 1e9:.3g} that it should give"


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


def lane_of(words: str) -> Transport:
    """The lane that an engine or UCX names, as of "tcp/eth0", "rdma mlx5_0" or "cuda_ipc/cuda"."""
    if words.startswith("UCX"):
        # What it was configured with, perhaps to exclude that: not what it takes for a peer.
        return Transport()
    found = (kind for kind, pattern in _WORDS if re.search(pattern, words.lower()))
    kind: LaneKind = next(found, "unknown")
    _, _, device = words.partition("/") if "/" in words else words.partition(" ")
    return Transport(kind, device if kind in ("tcp", "rdma") else "")


def wire_of(lines: list[str]) -> str:
    """What UCX writes a large piece over, of the tables that it prints; empty where it printed none."""
    found, is_write = "", False
    for line in lines:
        if " by ucp_" in line:
            is_write = _UCX_WRITE in line
        elif is_write and (cells := _UCX_CELLS.search(line)) and "inf" in cells[1]:
            found = cells[3].strip()
    return found


def seen_lane(reported: Transport, seen: Seen, fabric: Fabric) -> Transport:
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
        return Transport("tcp", interface_of(max(to_peer, key=lambda local: to_peer[local])), "observed")
    if reported.lane != "unknown":
        return reported
    memory = _memory_lane(seen)
    if memory.lane == "nvlink":
        return memory
    used = ",".join(sorted(port for port, count in ports.items() if count >= needed / len(ports)))
    rdma = Transport("rdma", used, "deduced: by the ports' counters")
    most, _ = expected_rate(fabric, rdma)
    tcp = Transport("tcp", known_by="deduced: other connections carried as much meanwhile")
    grown = [(tcp, sum(carried.values()))]
    if not most or seen.bytes_per_s <= most:
        grown.insert(0, (rdma, sum(ports.values())))
    fitting = [(lane, count) for lane, count in grown if count >= needed]
    for lane, count in fitting:
        if count <= _ABOUT * seen.total_bytes:
            return lane
    lanes = [lane for lane, _ in fitting] + [memory] * (memory.lane != "unknown")
    if len(lanes) > 1:
        kinds = " or ".join(lane.lane for lane in lanes)
        return Transport(known_by=f"{kinds}: others sent so much meanwhile that each is possible")
    return lanes[0] if lanes else reported


def _memory_lane(seen: Seen) -> Transport:
    """What carries bytes within a host that no network carries; unknown for a host that is far."""
    if not seen.is_near:
        return Transport()
    if not seen.on_gpu:
        return Transport("shared_memory", known_by="deduced: no network carried it")
    kind: LaneKind = "nvlink" if seen.bytes_per_s > _FASTEST_PCIE_BYTES_PER_S else "cuda_ipc"
    return Transport(kind, known_by="deduced: by its rate, and no network carried it")


def expected_rate(fabric: Fabric, lane: Transport, copy_bytes_per_s: float = 0.0) -> tuple[float, str]:
    """What a lane should give in bytes a second, and why; 0 where that is not known.

    ``copy_bytes_per_s`` is that of a plain copy within a process, and the most that shared memory gives.
    """
    links = [int(link[2:]) for link in fabric.links.values() if re.fullmatch(r"NV\d+", link)]
    if links and lane.lane in ("nvlink", "cuda_ipc"):
        return max(links) * _NVLINK_BYTES_PER_S, f"NV{max(links)}"
    if lane.lane == "rdma" and (active := fabric.active_ports):
        devices = {name.partition(":")[0] for name in lane.device.split(",")}
        named = [port for port in active if port.device in devices] or active[:1]
        shown = ", ".join(f"{port.device}, {port.rate}" for port in named)
        return sum(port.bytes_per_s for port in named), shown
    if lane.lane == "tcp" and (speed := fabric.speeds.get(lane.device)):
        return speed * 1e6 / 8, f"{lane.device}, {speed} Mb/s"
    if lane.lane == "shared_memory":
        return copy_bytes_per_s, "a plain copy of memory"
    return 0.0, f"nothing known of {lane.lane}{'/' * bool(lane.device)}{lane.device}"


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
    """How many NVLinks join two GPUs, as ``nvidia-smi`` writes it: ``NV18``. Nothing without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        places = [pynvml.nvmlDeviceGetPciInfo(gpu).busId for gpu in gpus]
        # A link that ends at no GPU ends at a switch, which leads to all that have such links.
        counts = [
            [sum(end == place or end not in places for end in _link_ends(gpu)) for place in places]
            for gpu in gpus
        ]
        pairs = itertools.permutations(range(len(gpus)), 2)
        joined = {(one, other): min(counts[one][other], counts[other][one]) for one, other in pairs}
        return {pair: f"NV{count}" for pair, count in joined.items() if count}
    except pynvml.NVMLError as error:
        logger.debug("the links of GPUs cannot be read: %s", error)
        return {}
    finally:
        pynvml.nvmlShutdown()


def _link_ends(gpu: Any) -> list[Any]:
    """The PCI addresses at the other ends of a GPU's NVLinks that are up."""
    import pynvml

    ends = []
    for number in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(gpu, number):
                ends.append(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, number).busId)
        except pynvml.NVMLError:
            # It has no more of them.
            break
    return ends
