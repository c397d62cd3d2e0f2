"""What a serving stack's prefill node sends beside the KV, such as the first token: rows of its buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from kvconnect.errors import ConfigError
from kvconnect.peer.messages import MAX_ATTACHMENT_BYTES


class AttachedRows:
    """Buffers of equal numbers of rows in host memory, by address; row i of all is one attachment.

    Raises ``ConfigError``: it is larger than an attachment may be.
    """

    def __init__(self, addresses: Sequence[int], row_bytes: Sequence[int]) -> None:
        self.row_bytes = tuple(row_bytes)
        self._addresses = tuple(addresses)
        if sum(row_bytes) > MAX_ATTACHMENT_BYTES:
            raise ConfigError(
                f"the rows beside a prompt's KV have {sum(row_bytes)} bytes: {list(row_bytes)}; accepted: "
                f"{MAX_ATTACHMENT_BYTES} in all"
            )

    def read(self, index: int) -> bytes:
        pools = zip(self._addresses, self.row_bytes, strict=True)
        return b"".join(ctypes.string_at(address + index * size, size) for address, size in pools)

    def write(self, index: int, data: bytes) -> bool:
        """Write what ``read`` returned on the other node. False: it is of other rows."""
        if len(data) != sum(self.row_bytes):
            return False
        at = 0
        for address, size in zip(self._addresses, self.row_bytes, strict=True):
            ctypes.memmove(address + index * size, data[at : at + size], size)
            at += size
        return True
