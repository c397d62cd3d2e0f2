"""The format of a record on disk or in a store: a header of 132 bytes, then the bytes of one row.

The header names the namespace, cache group, hash and row length, and has its own checksum, so that a scan
recognizes a header without reading rows. The row's checksum is keyed with the header: a row never verifies
under another content or namespace. On disk an optional footer with the content's tokens may follow.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64_intdigest

from kvconnect.errors import LocalError
from kvconnect.offload.tier import MAX_HASH_BYTES, Content

FORMAT_VERSION = 1
MAX_RECORD_BYTES = 1 << 36
"""The longest row, in bytes."""

MAX_FOOTER_BYTES = 1 << 14
"""Longer footers are not kept; this holds about 4 000 tokens of one block."""

MAGIC = b"KVCR"
_NAMESPACE_BYTES = 32
_KEY = struct.Struct(f"<4sHHIQ{_NAMESPACE_BYTES}s{MAX_HASH_BYTES}s")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _KEY.size + 2 * _CHECK.size


class RecordFormat:
    """Makes and checks records of one namespace, given as the hexadecimal digest of ``Namespace``."""

    def __init__(self, namespace: str) -> None:
        self._digest = bytes.fromhex(namespace)

    def header(self, content: Content, row: memoryview) -> bytes:
        """The header of a record of this content.

        Raises:
            LocalError: the row or the hash is empty or too long, or the group is negative.
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
        """The length of the row behind an intact header of this namespace; 0 for any other header."""
        length_bytes = int(_KEY.unpack_from(header)[4]) if namespace_of(header) == self._digest else 0
        return length_bytes if length_bytes <= MAX_RECORD_BYTES else 0

    def flaw(self, header: bytes | bytearray | memoryview, content: Content, row: memoryview) -> str:
        """``corrupt`` or ``foreign`` if header and row are not this content's record; empty if they are."""
        raw = bytes(header)
        if raw == self.header(content, row):
            return ""
        return "foreign" if namespace_of(raw) not in (None, self._digest) else "corrupt"


def sealed(header: bytes, footer: bytes) -> bytes:
    """The footer with a checksum keyed by the header; empty if the footer is empty or too long."""
    if not 0 < len(footer) <= MAX_FOOTER_BYTES:
        return b""
    return footer + _CHECK.pack(xxh3_64_intdigest(footer, xxh3_64_intdigest(header)))


def opened(header: bytes, sealed: bytes) -> bytes:
    """The footer that ``sealed`` made for this header; empty if its checksum does not match."""
    footer, check = sealed[: -_CHECK.size], sealed[-_CHECK.size :]
    is_right = check == _CHECK.pack(xxh3_64_intdigest(footer, xxh3_64_intdigest(header)))
    return footer if is_right else b""


def namespace_of(header: bytes) -> bytes | None:
    """The digest of the namespace in an intact header; None for a damaged header or another version."""
    body, check = header[: -_CHECK.size], header[-_CHECK.size :]
    if len(header) != HEADER_BYTES or check != _CHECK.pack(xxh3_64_intdigest(body)):
        return None
    magic, version, _, _, _, digest, _ = _KEY.unpack_from(header)
    return digest if (magic, version) == (MAGIC, FORMAT_VERSION) else None
