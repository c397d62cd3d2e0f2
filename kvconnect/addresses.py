"""Network addresses as settings spell them."""

from __future__ import annotations

import ipaddress


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port of ``host:port``, an IPv6 host without its brackets; None if it is something else."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) <= 65535:
        return None
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from its own machine. A name is not looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
