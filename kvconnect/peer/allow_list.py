"""Lists of addresses in an operator's notation: hosts, networks and ports. No name is looked up."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvconnect.errors import ConfigError

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_ACCEPTED = (
    "host, host:port, network and network:port-port, such as 10.0.0.0/24:14600-14607 or [2001:db8::/64]:14600"
)
_WITH_PORTS = re.compile(r"(?:\[([^\[\]]+)\]|([^:]+))(?::(.*))?")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


@dataclass(frozen=True)
class _Entry:
    """One listed address. ``network`` is None for a host name, which is compared as text, not looked up."""

    name: str
    network: _Network | None
    first_port: int
    last_port: int

    def matches(self, host: str, address: _Network | None, port: int | None) -> bool:
        if port is not None and not self.first_port <= port <= self.last_port:
            return False
        if self.network is None or address is None:
            return self.network is None and self.name == host.lower()
        return self.network.version == address.version and address.subnet_of(self.network)  # type: ignore[arg-type]


class AllowList:
    """Addresses as in ``ExtraConfig.allow_peers``; False if empty. Raises ``ConfigError``: a wrong entry."""

    def __init__(self, entries: Iterable[str], field: str = "kv_connector_extra_config.allow_peers") -> None:
        self._entries = [_parse(entry, field) for entry in entries]

    def __bool__(self) -> bool:
        return bool(self._entries)

    def allows(self, host: str, port: int | None) -> bool:
        """Whether an address is listed; with ``port`` None, whether any port of the host is."""
        address = _network(host)
        return any(entry.matches(host, address, port) for entry in self._entries)


def same_host(first: str, second: str) -> bool:
    """Whether two texts are the same address or name. Loopback addresses and ``localhost`` are the same."""
    one, other = (_network("127.0.0.1" if host.lower() == "localhost" else host) for host in (first, second))
    if one is None or other is None:
        return first.lower() == second.lower()
    return one == other or (one.is_loopback and other.is_loopback)


def _parse(text: str, field: str) -> _Entry:
    # An IPv6 address without brackets has no port.
    found = None if text.count(":") > 1 and not text.startswith("[") else _WITH_PORTS.fullmatch(text)
    host, ports = (found[1] or found[2], found[3]) if found else (text, None)
    network = _network(host)
    if network is None and not _NAME.fullmatch(host):
        raise ConfigError(f"{field} has {text!r}; accepted: {_ACCEPTED}")
    first, last = 1, 65535
    if ports is not None:
        numbers = _PORTS.fullmatch(ports)
        first, last = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (0, 0)
        if not 1 <= first <= last <= 65535:
            raise ConfigError(f"{field} has {text!r}, whose ports are no range within 1 to 65535")
    return _Entry(host.lower(), network, first, last)


def _network(text: str) -> _Network | None:
    """The network of a text, or None. An address is a network of one; a mapped IPv4 address is IPv4."""
    try:
        found = ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
    mapped = found.network_address.ipv4_mapped if isinstance(found, ipaddress.IPv6Network) else None
    return ipaddress.ip_network(mapped) if mapped is not None and found.prefixlen == 128 else found
