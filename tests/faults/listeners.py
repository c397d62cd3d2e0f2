"""Where a process listens, read from /proc: no tool for it is on every machine."""

from __future__ import annotations

import ipaddress
import os
import re
import struct
from pathlib import Path

_LISTENING = "0A"
_EVERYWHERE = (ipaddress.ip_address("0.0.0.0"), ipaddress.ip_address("::"))


def listeners(pid: int) -> list[tuple[str, int]]:
    """The TCP addresses of a process, those on all interfaces as loopback.

    Raises:
        OSError: there is no such process, or it is somebody else's.
    """
    descriptors = Path(f"/proc/{pid}/fd").iterdir()
    sockets = (re.fullmatch(r"socket:\[(\d+)\]", _link(descriptor)) for descriptor in descriptors)
    inodes = {matched[1] for matched in sockets if matched}
    found: list[tuple[str, int]] = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.append((_host(address), int(port, 16)))
    return found


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""  # it was closed meanwhile


def _host(text: str) -> str:
    """An address as the kernel writes it: words of 32 bits in the order of this machine, in hex."""
    words = struct.pack(f"={len(text) // 8}I", *(int(text[at : at + 8], 16) for at in range(0, len(text), 8)))
    address = ipaddress.ip_address(words)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return "127.0.0.1" if address in _EVERYWHERE else str(address)
