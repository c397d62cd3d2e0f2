"""Tables of segments: what they list is what a walk finds, and what is wrong with them costs no record."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from kvconnect.offload.disk.files import Files
from kvconnect.offload.disk.scan import scan
from kvconnect.offload.disk.table import ENTRY_BYTES, TRAILER_BYTES, pack_table, read_trailer
from kvconnect.offload.record import RecordFormat

FORMAT = RecordFormat("ab" * 32)
ROWS = st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=10)


class CountingFiles(Files):
    def __init__(self):
        self.reads = 0

    def read(self, file, buffers, offset):
        self.reads += 1
        return super().read(file, buffers, offset)


def segment(rows):
    """The records of some rows, and the table behind them; where the records are."""
    data, headers, entries = b"", [], []
    for index, row in enumerate(rows):
        content = (index % 3, b"%d" % index)
        entries.append((content, len(data)))
        headers.append(FORMAT.header(content, memoryview(row)))
        data += headers[-1] + row
    return data, pack_table(headers, len(data)), entries


def scanned(path, data):
    path.write_bytes(data)
    files = CountingFiles()
    file = os.open(path, os.O_RDONLY)
    try:
        return scan(files, file, FORMAT), files.reads
    finally:
        os.close(file)


@given(ROWS)
def test_a_table_is_what_a_walk_finds(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("table") / "file"
    data, table, entries = segment(rows)
    assert len(table) == len(rows) * ENTRY_BYTES + TRAILER_BYTES
    by_table, reads = scanned(path, data + table)
    walked, _reads = scanned(path, data)
    assert by_table.entries == walked.entries == entries
    assert not by_table.flaws
    assert (by_table.length_bytes, walked.length_bytes) == (len(data + table), len(data))
    # One read of the trailer in the search for it, and one of the table.
    assert reads == 2


@given(ROWS, st.data())
def test_a_damaged_table_costs_no_record(tmp_path_factory, rows, drawn):
    path = tmp_path_factory.mktemp("table") / "file"
    data, table, entries = segment(rows)
    spoiled = bytearray(table)
    if drawn.draw(st.booleans()):
        spoiled[drawn.draw(st.integers(0, len(table) - 1))] ^= 1 << drawn.draw(st.integers(0, 7))
    else:
        spoiled = spoiled[: drawn.draw(st.integers(0, len(table) - 1))]
    found, _reads = scanned(path, data + bytes(spoiled))
    assert found.entries == entries


@given(ROWS, ROWS)
def test_a_table_of_other_records_is_none(tmp_path_factory, rows, others):
    path = tmp_path_factory.mktemp("table") / "file"
    data, _table, entries = segment(rows)
    other_data, other_table, _entries = segment([row + b"longer" for row in others])
    found, _reads = scanned(path, data + other_table)
    if len(other_data) != len(data):
        assert found.entries == entries


@given(st.binary(max_size=200))
def test_garbage_is_no_trailer(tmp_path_factory, garbage):
    path = tmp_path_factory.mktemp("table") / "file"
    path.write_bytes(garbage)
    file = os.open(path, os.O_RDONLY)
    try:
        assert read_trailer(Files(), file) is None
    finally:
        os.close(file)
