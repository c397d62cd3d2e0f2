"""The format of a record in a lower tier, on disk or in a store: a header of 132 bytes, then those of a row.

The header names everything that it belongs to, and has a checksum of its own, so that a scan can tell a
header from garbage without reading rows. The checksum of the row is keyed with the header: the bytes of one
content never verify as another's, nor as another namespace's.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvconnect.errors import LocalError
from kvconnect.offload.tier import MAX_HASH_BYTES, Content

FORMAT_VERSION = 1
MAX_RECORD_BYTES = 1 << 36
"""Longer than any row: what says so is garbage."""

MAGIC = b"KVCR"
_NAMESPACE_BYTES = 32
_KEY = struct.Struct(f"<4sHHIQ{_NAMESPACE_BYTES}s{MAX_HASH_BYTES}s")
_CHECK = struct.Struct("<Q")
_PAYLOAD_CHECK_AT = _KEY.size
_HEADER_CHECK_AT = _KEY.size + _CHECK.size
HEADER_BYTES = _KEY.size + 2 * _CHECK.size


class Flaw(enum.Enum):
    """Why bytes are not the record that was expected; the value is what it is counted as."""

    CORRUPT = "disk_corrupt"
    FOREIGN = "disk_foreign"
    TORN = "disk_torn"


class Header(NamedTuple):
    """What an intact header says; ``is_ours`` if it is of the right namespace."""

    content: Content
    length_bytes: int
    is_ours: bool


class RecordFormat:
    """Makes and checks records of one namespace.

    Args:
        namespace: the digest of everything that the bytes depend on beside their content, in hexadecimal.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._digest = bytes.fromhex(namespace)[:_NAMESPACE_BYTES].ljust(_NAMESPACE_BYTES, b"\0")

    def header(self, content: Content, row: memoryview) -> bytes:
        """The header of a record of this content.

        Raises:
            LocalError: the row is empty or too long, or the hash or the group cannot be kept.
        """
        key = self._key(content, len(row))
        body = key + _CHECK.pack(_payload_check(key, row))
        return body + _CHECK.pack(xxh3_64_intdigest(body))

    def parse(self, header: bytes | bytearray | memoryview) -> Header | Flaw:
        """What a header says, or why it is none; the row is not looked at."""
        raw = bytes(header)
        if len(raw) < HEADER_BYTES:
            return Flaw.TORN
        (check,) = _CHECK.unpack_from(raw, _HEADER_CHECK_AT)
        magic, version, hash_bytes, group, length_bytes, digest, padded = _KEY.unpack_from(raw)
        if magic != MAGIC or check != xxh3_64_intdigest(raw[:_HEADER_CHECK_AT]):
            return Flaw.CORRUPT
        if version != FORMAT_VERSION:
            return Flaw.FOREIGN
        if not 0 < hash_bytes <= MAX_HASH_BYTES or not 0 < length_bytes <= MAX_RECORD_BYTES:
            return Flaw.CORRUPT
        return Header((group, padded[:hash_bytes]), length_bytes, digest == self._digest)

    def flaw(self, header: bytes | bytearray | memoryview, content: Content, row: memoryview) -> Flaw | None:
        """Why a header and a row are not the record of this content; None if they are."""
        key, raw = self._key(content, len(row)), bytes(header)
        if raw[:_PAYLOAD_CHECK_AT] != key:
            said = self.parse(raw)
            is_foreign = said is Flaw.FOREIGN or (isinstance(said, Header) and not said.is_ours)
            return Flaw.FOREIGN if is_foreign else Flaw.CORRUPT
        (header_check,) = _CHECK.unpack_from(raw, _HEADER_CHECK_AT)
        (payload_check,) = _CHECK.unpack_from(raw, _PAYLOAD_CHECK_AT)
        if header_check != xxh3_64_intdigest(raw[:_HEADER_CHECK_AT]):
            return Flaw.CORRUPT
        return None if payload_check == _payload_check(key, row) else Flaw.CORRUPT

    def _key(self, content: Content, length_bytes: int) -> bytes:
        group, digest = content
        if not 0 < len(digest) <= MAX_HASH_BYTES or not 0 < length_bytes <= MAX_RECORD_BYTES or group < 0:
            raise LocalError(
                f"a row of {length_bytes} bytes, group {group}, with a hash of {len(digest)} bytes cannot be "
                f"kept; accepted: 1 to {MAX_HASH_BYTES} bytes of hash, and a row that is not empty"
            )
        return _KEY.pack(MAGIC, FORMAT_VERSION, len(digest), group, length_bytes, self._digest, digest)


def namespace_of(header: bytes) -> str | None:
    """The namespace that an intact header names, as far as it does; None if it is not intact."""
    said = RecordFormat("00").parse(header)
    return _KEY.unpack_from(header)[5].hex() if isinstance(said, Header) else None


def _payload_check(key: bytes, row: memoryview) -> int:
    return xxh3_64_intdigest(row, xxh3_64_intdigest(key))
