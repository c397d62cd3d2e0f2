"""Lanes: which transport carries bytes to a peer, and the rate that its hardware should reach.

UCX chooses a transport for each peer, and reports it only on standard output. So the system's counters of
this process's TCP connections and of the RDMA ports are read before and after a calibration. If neither
explains the bytes, the lane is deduced, and marked as deduced. The root of ``/sys`` is an argument.
"""

from __future__ import annotations

import ipaddress
import itertools
import logging
import math
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
"""A rate below this share of the expected rate is worth a warning."""
_NVLINK_BYTES_PER_S = 25e9
"""One NVLink of any generation since Volta, per direction."""
_FASTEST_PCIE_BYTES_PER_S = 64e9
"""PCIe 5.0 x16. A higher rate between GPUs of one host must be NVLink."""
_ALL_OF = 0.9
"""A counter that grew by this part of the moved bytes carried them: the last ones may lack their ACK."""
_ABOUT = 1.5
"""A counter that grew by at most this multiple carried little else: headers, and the side channel."""
_MOST_DESCRIPTORS = 1000
ACTIVE = "ACTIVE"
_ACKED_AT = 120
"""The offset in bytes of ``tcpi_bytes_acked`` in Linux's ``tcp_info``."""
MOST_BYTES_PER_S = 1e15
MOST_TEXT = 256
BytesPerSecond = Annotated[float, msgspec.Meta(ge=0, le=MOST_BYTES_PER_S)]
_PRINTABLE = r"^[ -~]*\Z"
"""Printable ASCII, since the text is shown in logs."""
Text = Annotated[str, msgspec.Meta(max_length=MOST_TEXT, pattern=_PRINTABLE)]


class Transport(msgspec.Struct, frozen=True, array_like=True, tag="transport"):
    """P to D, once per connection, before the first fetch is served: the lane and its rate.

    ``bytes_per_s`` is the rate of P's calibration, 0 if there was none. ``expected_bytes_per_s`` is the rate
    that the hardware should reach, 0 if unknown. ``known_by`` is how the lane was found; empty if the engine
    reported it. ``refusal`` is why P's settings forbid P to send over this lane.
    """

    lane: LaneKind = "unknown"
    device: Text = ""
    known_by: Text = ""
    bytes_per_s: BytesPerSecond = 0.0
    expected_bytes_per_s: BytesPerSecond = 0.0
    refusal: Annotated[str, msgspec.Meta(max_length=4096, pattern=_PRINTABLE)] = ""

    @property
    def name(self) -> str:
        """The lane with its device and how it was found, without rates."""
        known = "; ".join(filter(None, (self.device, self.known_by)))
        return f"{self.lane} ({known})" if known else self.lane

    @property
    def share(self) -> float:
        """The rate relative to the expected rate; 1 if either is unknown."""
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


UNKNOWN = Transport()


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA device."""

    device: str
    port: int
    state: str
    rate: str
    link_layer: str

    @property
    def bytes_per_s(self) -> float:
        """The rate from a text such as "400 Gb/sec (4X NDR)"; 0 if unknown."""
        found = re.match(r"[\d.]+", self.rate)
        return float(found[0]) * 1e9 / 8 if found else 0.0


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The hardware that can carry bytes: RDMA ports, network interfaces with their ``speeds`` in Mb/s, the
    names of GPUs, and the most ``nvlinks`` that join two of them."""

    rdma: tuple[RdmaPort, ...] = ()
    speeds: Mapping[str, int] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    nvlinks: int = 0

    @property
    def active_ports(self) -> list[RdmaPort]:
        """The RDMA ports whose link is up."""
        return [port for port in self.rdma if port.state == ACTIVE]


@dataclass(frozen=True)
class Traffic:
    """Counters of sent bytes: of this process's TCP connections by local and remote host, and of RDMA ports.

    An RDMA port's counter includes all processes of the machine.
    """

    tcp: dict[tuple[str, str], int] = field(default_factory=dict)
    rdma: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """A calibration: bytes moved, rate, the peer's host, and the system's counters before and after.

    ``is_near``: the peer is on this machine. ``on_gpu``: the memory is a GPU's.
    """

    total_bytes: int
    bytes_per_s: float
    host: str
    is_near: bool
    on_gpu: bool
    before: Traffic
    after: Traffic


def seen_lane(reported: Transport, seen: Seen, fabric: Fabric) -> Transport:
    """The lane of a calibration. TCP counters take precedence over the engine's report.

    Counters include bytes sent to other peers meanwhile. So a counter that grew by about the moved bytes is
    trusted; a counter that grew by more is used only if nothing else explains the bytes.
    """
    if not seen.total_bytes or not any(seen.before.tcp.values()) or not any(seen.after.tcp.values()):
        # No TCP counter was readable, since the side channel at least has a connection that sends.
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
    tcp = Transport("tcp", known_by="deduced: other connections carried as much meanwhile")
    counted = [(rdma, sum(ports.values())), (tcp, sum(carried.values()))]
    if seen.bytes_per_s > (expected_rate(fabric, rdma) or math.inf):
        del counted[0]
    possible = [(lane, count) for lane, count in counted if count >= needed]
    if exact := [lane for lane, count in possible if count <= _ABOUT * seen.total_bytes]:
        return exact[0]
    lanes = [lane for lane, _ in possible] + [memory] * (memory.lane != "unknown")
    if len(lanes) > 1:
        kinds = " or ".join(lane.lane for lane in lanes)
        return Transport(known_by=f"{kinds}: others sent so much meanwhile that each is possible")
    return lanes[0] if lanes else reported


def _memory_lane(seen: Seen) -> Transport:
    """The lane of bytes that no network carried; unknown unless the peer is on this machine."""
    if not seen.is_near:
        return Transport()
    if not seen.on_gpu:
        return Transport("shared_memory", known_by="deduced: no network carried it")
    kind: LaneKind = "nvlink" if seen.bytes_per_s > _FASTEST_PCIE_BYTES_PER_S else "cuda_ipc"
    return Transport(kind, known_by="deduced: by its rate, and no network carried it")


def expected_rate(fabric: Fabric, lane: Transport) -> float:
    """The rate in bytes per second that a lane should reach, 0 if unknown."""
    if lane.lane in ("nvlink", "cuda_ipc"):
        return fabric.nvlinks * _NVLINK_BYTES_PER_S
    if lane.lane == "rdma":
        devices, active = {name.partition(":")[0] for name in lane.device.split(",")}, fabric.active_ports
        named = [port for port in active if port.device in devices] or active[:1]
        return sum(port.bytes_per_s for port in named)
    return fabric.speeds.get(lane.device, 0) * 1e6 / 8 if lane.lane == "tcp" else 0.0


def look_at_traffic(root: Path = Path("/")) -> Traffic:
    """Read the counters; empty if they cannot be read. Takes up to 25 us per open descriptor."""
    try:
        rdma = {}
        for port in (root / "sys/class/infiniband").glob("*/ports/[0-9]*"):
            # The counter is in words of four bytes. EFA has a counter of bytes at another place.
            words, own = read_text(port / "counters/port_xmit_data"), read_text(port / "hw_counters/tx_bytes")
            sent = 4 * int(words) if words.isdecimal() else int(own or 0)
            rdma[f"{port.parents[1].name}:{port.name}"] = sent
        return Traffic(_tcp_traffic(), rdma)
    except Exception as error:
        logger.debug("the system's counters cannot be read: %r", error)
        return Traffic()


def _tcp_traffic() -> dict[tuple[str, str], int]:
    """Bytes sent by this process's TCP connections; empty if it has too many descriptors to read."""
    tcp: dict[tuple[str, str], int] = {}
    names = os.listdir("/proc/self/fd")
    for name in names if len(names) <= _MOST_DESCRIPTORS else ():
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                # A duplicate, because the library that owns the descriptor may close it at any time.
                own = os.dup(int(name))
                try:
                    _add_tcp(tcp, own)
                finally:
                    os.close(own)
        except (OSError, struct.error):
            continue
    return tcp


def _add_tcp(tcp: dict[tuple[str, str], int], descriptor: int) -> None:
    # With SOCK_NONBLOCK Python leaves the blocking mode alone, which the duplicate shares with the owner's.
    found = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=descriptor)
    try:
        if found.family not in (socket.AF_INET, socket.AF_INET6):
            return
        # Raises OSError for a socket that is no TCP connection.
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        between = _plain(found.getsockname()[0]), _plain(found.getpeername()[0])
    finally:
        found.detach()
    tcp[between] = tcp.get(between, 0) + int(struct.unpack_from("Q", info, _ACKED_AT)[0])


def _growth(before: dict[K, int], after: dict[K, int]) -> dict[K, int]:
    """The increase of each counter that grew. A connection that was closed meanwhile is ignored."""
    return {key: count - before.get(key, 0) for key, count in after.items() if count > before.get(key, 0)}


def _plain(host: str) -> str:
    """The canonical text of a host: a mapped IPv4 address as IPv4, and no zone."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)


def look_at_fabric(root: Path = Path("/"), *, with_gpus: bool) -> Fabric:
    """Find the hardware of this machine; GPUs only ``with_gpus``, which takes a second."""
    infiniband = root / "sys/class/infiniband"
    devices = sorted(infiniband.iterdir()) if infiniband.is_dir() else []
    rdma = tuple(port for device in devices for port in _ports(device))
    gpus, nvlinks = _gpus() if with_gpus else ((), 0)
    return Fabric(rdma=rdma, speeds=_speeds(root / "sys/class/net"), gpus=gpus, nvlinks=nvlinks)


def read_text(path: Path) -> str:
    """The text of a system file; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _ports(device: Path) -> list[RdmaPort]:
    return [
        RdmaPort(
            device.name,
            int(port.name),
            # The file has a text such as "4: ACTIVE".
            read_text(port / "state").rpartition(":")[2].strip(),
            read_text(port / "rate"),
            read_text(port / "link_layer"),
        )
        for port in sorted((device / "ports").glob("[0-9]*"))
    ]


def _speeds(interfaces: Path) -> dict[str, int]:
    """The speeds of interfaces in Mb/s. Virtual interfaces have none, or -1, and are left out."""
    texts = {path.parent.name: read_text(path) for path in interfaces.glob("*/speed")}
    return {name: int(text) for name, text in texts.items() if text.isdecimal()}


def _gpus() -> tuple[tuple[str, ...], int]:
    """The names of this machine's GPUs, none without a driver, and the most NVLinks that join two of them."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), 0
    try:
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        places = [pynvml.nvmlDeviceGetPciInfo(gpu).busId for gpu in gpus]
        # A link that ends at no GPU ends at a switch, which leads to all that have such links.
        counts = [
            [sum(end == place or end not in places for end in _link_ends(gpu)) for place in places]
            for gpu in gpus
        ]
        pairs = itertools.combinations(range(len(gpus)), 2)
        most = max((min(counts[one][other], counts[other][one]) for one, other in pairs), default=0)
        return tuple(pynvml.nvmlDeviceGetName(gpu) for gpu in gpus), most
    except pynvml.NVMLError as error:
        logger.debug("the GPUs cannot be read: %s", error)
        return (), 0
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
