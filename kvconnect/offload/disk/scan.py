"""Finds the records of a segment: by the table at its end, or by their headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvconnect.offload.disk.files import Files
from kvconnect.offload.disk.table import Trailer, read_table, read_trailer
from kvconnect.offload.record import HEADER_BYTES, MAGIC, Flaw, Header, RecordFormat
from kvconnect.offload.tier import Content

_SEARCH_BYTES = 1 << 20


@dataclass
class Scan:
    """What a segment has: contents and offsets; behind ``length_bytes`` there is nothing of use."""

    entries: list[tuple[Content, int]] = field(default_factory=list)
    length_bytes: int = 0
    flaws: Counter[Flaw] = field(default_factory=Counter)


def walk(files: Files, file: int, record_format: RecordFormat) -> Iterator[tuple[int, Header | Flaw]]:
    """The offset and the header of every record, in order, and a flaw for whatever is between them or behind.

    What is no record has no length that can be believed: the next record begins where the next intact header
    is, which is looked for.

    Raises:
        OSError: the file cannot be read.
    """
    trailer = read_trailer(files, file)
    end, offset = trailer.data_bytes if trailer else files.length(file), 0
    raw = bytearray(HEADER_BYTES)
    while offset < end:
        got = files.read(file, [raw], offset)
        header = record_format.parse(memoryview(raw)[:got])
        if isinstance(header, Header) and offset + header.record_bytes > end:
            header = Flaw.TORN
        yield offset, header
        if isinstance(header, Header):
            offset += header.record_bytes
        else:
            offset = _next_header(files, file, record_format, offset + 1, end)


def _next_header(files: Files, file: int, record_format: RecordFormat, offset: int, end: int) -> int:
    """Where the next whole record begins, ``end`` if there is none."""
    chunk = bytearray(_SEARCH_BYTES)
    while offset < end:
        got = files.read(file, [chunk], offset)
        if got < HEADER_BYTES:
            return end
        at = chunk.find(MAGIC, 0, got)
        while at >= 0 and at + HEADER_BYTES <= got:
            header = record_format.parse(memoryview(chunk)[at : at + HEADER_BYTES])
            if isinstance(header, Header) and offset + at + header.record_bytes <= end:
                return offset + at
            at = chunk.find(MAGIC, at + 1, got)
        offset += got - HEADER_BYTES + 1
    return end


def scan(files: Files, file: int, record_format: RecordFormat) -> Scan:
    """The records of a segment; rows are looked at when they are read.

    Raises:
        OSError: the file cannot be read.
    """
    found = Scan()
    trailer = read_trailer(files, file)
    if trailer is not None:
        by_table = _scan_table(files, file, record_format, trailer)
        if by_table is not None:
            return by_table
        found.flaws[Flaw.CORRUPT] += 1
    files.expect_whole_read(file)
    for offset, header in walk(files, file, record_format):
        if isinstance(header, Flaw):
            found.flaws[header] += 1
            continue
        if header.is_ours:
            found.entries.append((header.content, offset))
        else:
            found.flaws[Flaw.FOREIGN] += 1
        found.length_bytes = offset + header.record_bytes
    return found


def _scan_table(files: Files, file: int, record_format: RecordFormat, trailer: Trailer) -> Scan | None:
    """The records of a sealed segment; None if its table is not right."""
    headers = read_table(files, file, trailer)
    if headers is None:
        return None
    found, offset = Scan(length_bytes=files.length(file)), 0
    for raw in headers:
        header = record_format.parse(raw)
        if isinstance(header, Flaw):
            return None
        if header.is_ours:
            found.entries.append((header.content, offset))
        else:
            found.flaws[Flaw.FOREIGN] += 1
        offset += header.record_bytes
    return found if offset == trailer.data_bytes else None
