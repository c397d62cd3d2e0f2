"""The format of a record in a lower tier, on disk or in a store: a header of 132 bytes, then those of a row.

On disk a footer may follow, which has what the content stands for: without it a record is as good.

The header names everything that it belongs to, and has a checksum of its own, so that a scan recognizes
a header without reading rows. The checksum of the row is keyed with the header: the bytes of one content
never verify as another's, nor as another namespace's.
"""

from __future__ import annotations

import enum
import struct

from xxhash import xxh3_64_intdigest

from kvconnect.errors import LocalError
from kvconnect.offload.tier import MAX_HASH_BYTES, Content

FORMAT_VERSION = 1
MAX_RECORD_BYTES = 1 << 36
"""Longer than any row."""

MAX_FOOTER_BYTES = 1 << 14
"""A longer one is not kept: 4 000 tokens in one block."""

MAGIC = b"KVCR"
_NAMESPACE_BYTES = 32
_KEY = struct.Struct(f"<4sHHIQ{_NAMESPACE_BYTES}s{MAX_HASH_BYTES}s")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _KEY.size + 2 * _CHECK.size


class Flaw(enum.Enum):
    """Why bytes are not the record that was expected; the value is what it is counted as."""

    CORRUPT = "disk_corrupt"
    FOREIGN = "disk_foreign"


class RecordFormat:
    """Makes and checks records of one namespace, the digest of what bytes depend on beside their content."""

    def __init__(self, namespace: str) -> None:
        self._digest = bytes.fromhex(namespace)[:_NAMESPACE_BYTES].ljust(_NAMESPACE_BYTES, b"\0")

    def header(self, content: Content, row: memoryview) -> bytes:
        """The header of a record of this content.

        Raises:
            LocalError: the row is empty or too long, or the hash or the group cannot be kept.
        """
        (group, digest), length_bytes = content, len(row)
        if not 0 < len(digest) <= MAX_HASH_BYTES or not 0 < length_bytes <= MAX_RECORD_BYTES or group < 0:
            raise LocalError(
                f"a row of {length_bytes} bytes, group {group}, with a hash of {len(digest)} bytes cannot be "
                f"kept; accepted: 1 to {MAX_HASH_BYTES} bytes of hash, and a row that is not empty"
            )
        key = _KEY.pack(MAGIC, FORMAT_VERSION, len(digest), group, length_bytes, self._digest, digest)
        body = key + _CHECK.pack(xxh3_64_intdigest(row, xxh3_64_intdigest(key)))
        return body + _CHECK.pack(xxh3_64_intdigest(body))

    def row_bytes(self, header: bytes) -> int:
        """How long the row behind an intact header of ours is; 0 for any other."""
        length_bytes = int(_KEY.unpack_from(header)[4]) if _namespace(header) == self._digest else 0
        return length_bytes if length_bytes <= MAX_RECORD_BYTES else 0

    def flaw(self, header: bytes | bytearray | memoryview, content: Content, row: memoryview) -> Flaw | None:
        """Why a header and a row are not the record of this content; None if they are."""
        raw = bytes(header)
        if raw == self.header(content, row):
            return None
        stated = _namespace(raw)
        return Flaw.FOREIGN if stated not in (None, self._digest) else Flaw.CORRUPT


def sealed(header: bytes, footer: bytes) -> bytes:
    """A footer as it is kept behind the row of this header; empty where there is none, or too much."""
    if not 0 < len(footer) <= MAX_FOOTER_BYTES:
        return b""
    return footer + _CHECK.pack(xxh3_64_intdigest(footer, xxh3_64_intdigest(header)))


def opened(header: bytes, sealed: bytes) -> bytes:
    """The footer of a record with this header, as it was sealed; empty if it is not right."""
    footer, check = sealed[: -_CHECK.size], sealed[-_CHECK.size :]
    is_right = check == _CHECK.pack(xxh3_64_intdigest(footer, xxh3_64_intdigest(header)))
    return footer if is_right else b""


def namespace_of(header: bytes) -> str | None:
    """The namespace that an intact header names, as far as it does; None if it is not intact."""
    stated = _namespace(header)
    return stated.hex() if stated else None


def _namespace(header: bytes) -> bytes | None:
    """The digest in an intact header; empty for another version, None if it is not intact."""
    body, check = header[: -_CHECK.size], header[-_CHECK.size :]
    if len(header) != HEADER_BYTES or check != _CHECK.pack(xxh3_64_intdigest(body)):
        return None
    magic, version, _, _, _, digest, _ = _KEY.unpack_from(header)
    return None if magic != MAGIC else digest if version == FORMAT_VERSION else b""
