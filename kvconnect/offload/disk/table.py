"""The table at the end of a sealed segment: the headers of all its records, so that one read finds them all.

It says nothing that the records do not say themselves: without it, or where it is damaged, a segment is
walked from header to header. Its entries are no headers as they stand: a walk takes none for a record.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvconnect.offload.disk.files import Files
from kvconnect.offload.record import FORMAT_VERSION, HEADER_BYTES, MAGIC

ENTRY_BYTES = HEADER_BYTES - len(MAGIC)
"""What a record adds to the table."""

_END_MAGIC = b"KVCE"
_TRAILER = struct.Struct("<4sHHIQQ")
_CHECK = struct.Struct("<Q")
TRAILER_BYTES = _TRAILER.size + _CHECK.size


class Trailer(NamedTuple):
    """The last bytes of a sealed segment: how many records there are, and where they end."""

    num_records: int
    data_bytes: int
    table_check: int


def pack_table(headers: Sequence[bytes], data_bytes: int) -> bytes:
    """The table of records that begin at 0 and follow one another up to ``data_bytes``, and the trailer."""
    table = b"".join(header[len(MAGIC) :] for header in headers)
    trailer = _TRAILER.pack(_END_MAGIC, FORMAT_VERSION, 0, len(headers), data_bytes, xxh3_64_intdigest(table))
    return table + trailer + _CHECK.pack(xxh3_64_intdigest(trailer))


def read_trailer(files: Files, file: int) -> Trailer | None:
    """The trailer of a segment; None if it has none, or none that fits its length.

    Raises:
        OSError: the file cannot be read.
    """
    end = files.length(file)
    raw = bytearray(TRAILER_BYTES)
    if end < TRAILER_BYTES or files.read(file, [raw], end - TRAILER_BYTES) < TRAILER_BYTES:
        return None
    body = bytes(raw[: _TRAILER.size])
    magic, version, _zero, count, data_bytes, table_check = _TRAILER.unpack(body)
    (check,) = _CHECK.unpack_from(raw, _TRAILER.size)
    if (magic, version, check) != (_END_MAGIC, FORMAT_VERSION, xxh3_64_intdigest(body)):
        return None
    if data_bytes + count * ENTRY_BYTES + TRAILER_BYTES != end:
        return None
    return Trailer(count, data_bytes, table_check)


def read_table(files: Files, file: int, trailer: Trailer) -> list[bytes] | None:
    """The headers of a segment's records, in order; None if the table is damaged.

    Raises:
        OSError: the file cannot be read.
    """
    table = bytearray(trailer.num_records * ENTRY_BYTES)
    if files.read(file, [table], trailer.data_bytes) < len(table):
        return None
    if xxh3_64_intdigest(table) != trailer.table_check:
        return None
    return [MAGIC + bytes(table[start : start + ENTRY_BYTES]) for start in range(0, len(table), ENTRY_BYTES)]
