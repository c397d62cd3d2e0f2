"""Network addresses as settings spell them."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from kvconnect.errors import ConfigError


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port of ``host:port``, an IPv6 host without its brackets; None if it is something else."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) <= 65535:
        return None
    return host, int(port)


def join_address(host: str, port: int | str) -> str:
    """``host:port``, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_address(address: str, where: str) -> tuple[str, int]:
    """As ``split_address``. Raises ``ConfigError``: it is something else."""
    split = split_address(address)
    if split is None:
        raise ConfigError(f"{where} is {address!r}; accepted: HOST:PORT of a side channel")
    return split


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from its own machine. A name is not looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def own_address(host: str, port: int) -> str:
    """The address of this machine from which another one is reached; nothing is sent."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    return "127.0.0.1"
