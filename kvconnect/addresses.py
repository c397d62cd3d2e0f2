"""Network addresses as settings spell them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import socket
import struct
from typing import Annotated

import msgspec

from kvconnect.errors import ConfigError

ANY = ("0.0.0.0", "::", "*", "")
"""The hosts that mean all addresses when listening, and cannot be connected to."""
TAKEN = "is taken"
_ADDRESS_AT: dict[int, tuple[int, int]] = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""Where an address begins in its family's ``sockaddr``, and its length."""
_ENTRY = struct.Struct("PPIP")
"""The first fields of ``ifaddrs``: next entry, interface name, flags, address."""


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port of ``host:port``, an IPv6 host without its brackets; None for any other text."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) <= 65535:
        return None
    return host, int(port)


def join_address(host: str, port: int | str) -> str:
    """``host:port``, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether an address, or a network's, can only be reached from its own machine. No name is looked up."""
    try:
        return ipaddress.ip_network(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_address(host: str) -> bool:
    """Whether ``host`` is an address, and neither a name nor a network."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def interface_addresses() -> list[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """The addresses of this machine, each with the interface that has it."""
    libc, first, found = ctypes.CDLL(None), ctypes.c_void_p(), []
    libc.getifaddrs(ctypes.byref(first))
    entry = first.value or 0
    while entry:
        entry, name, _, at = _ENTRY.unpack(ctypes.string_at(entry, _ENTRY.size))
        family = ctypes.c_uint16.from_address(at).value if at else 0
        if family in _ADDRESS_AT:
            begin, length = _ADDRESS_AT[family]
            address = ipaddress.ip_address(ctypes.string_at(at + begin, length))
            found.append((ctypes.string_at(name).decode(), address))
    libc.freeifaddrs(first)
    return found


def interface_of(host: str) -> str:
    """The interface that has an address; empty if none has, or ``host`` is a name."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return ""
    found = [(name, known) for name, known in interface_addresses() if known.version == address.version]
    if address.is_loopback:
        # The interface lists one address for all of 127.0.0.0/8.
        return next((name for name, known in found if known.is_loopback), "")
    return next((name for name, known in found if known == address), "")


def is_here(host: str) -> bool:
    """Whether this machine has the address, or one in the network; true for any name."""
    try:
        network = ipaddress.ip_network(host)
    except ValueError:
        return True
    own = (address for _, address in interface_addresses())
    return network.is_loopback or network.is_unspecified or any(address in network for address in own)


def address_within(host: str, where: str) -> str:
    """This machine's address in a network such as ``10.0.0.0/16``; any other text is returned unchanged.

    Raises ``ConfigError``: the network is not valid, or this machine has no address in it, or several.
    """
    if "/" not in host:
        return host
    known = dict.fromkeys((str(address), name) for name, address in interface_addresses())
    try:
        network = ipaddress.ip_network(host)
    except ValueError as error:
        raise ConfigError(f"{where} is {host!r}: {error}; accepted: an address, or a network") from error
    found = [address for address, _ in known if ipaddress.ip_address(address) in network]
    if len(found) != 1:
        shown = ", ".join(f"{address} of {name}" for address, name in known)
        raise ConfigError(
            f"{where} is {host!r}, in which this machine has {', '.join(found) or 'no address'}; accepted: a "
            f"network with one of its addresses, which are {shown}"
        )
    return found[0]


def own_address(host: str, port: int) -> str:
    """This machine's address on the route to another host; sends no packet."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


class RankAddress(msgspec.Struct, frozen=True, array_like=True):
    """The address at which one worker rank listens for peers."""

    rank: int
    host: str
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]


def look_at_port(host: str, port: int) -> str:
    """Listen as a node would, for a moment; port 0 means any port.

    Why it cannot: ``TAKEN`` where a process listens already, or another reason; empty if it can.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            # As ZeroMQ does: a connection in TIME_WAIT does not block the port.
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
            tried.listen(1)
    except OSError as error:
        return TAKEN if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return ""
