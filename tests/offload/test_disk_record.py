"""Records: what was written verifies, and nothing else does."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import LocalError
from kvconnect.offload.disk.files import Files
from kvconnect.offload.disk.scan import scan
from kvconnect.offload.record import HEADER_BYTES, Flaw, Header, RecordFormat, namespace_of

OURS, THEIRS = "ab" * 32, "ab" * 31 + "ac"
CONTENTS = st.tuples(st.integers(0, 2**31), st.binary(min_size=1, max_size=64))
ROWS = st.binary(min_size=1, max_size=400)


@given(CONTENTS, ROWS)
def test_a_header_says_what_it_was_made_of(content, row):
    header = RecordFormat(OURS).header(content, memoryview(row))
    assert len(header) == HEADER_BYTES
    assert RecordFormat(OURS).parse(header) == Header(content, len(row), True)
    assert RecordFormat(OURS).flaw(header, content, memoryview(row)) is None
    assert namespace_of(header) == OURS


@given(CONTENTS, ROWS, st.data())
def test_one_changed_bit_is_seen(content, row, data):
    record = bytearray(RecordFormat(OURS).header(content, memoryview(row)) + row)
    at = data.draw(st.integers(0, len(record) - 1))
    record[at] ^= 1 << data.draw(st.integers(0, 7))
    raw, view = record[:HEADER_BYTES], memoryview(record)[HEADER_BYTES:]
    assert RecordFormat(OURS).flaw(raw, content, view) is not None
    if at < HEADER_BYTES:
        assert RecordFormat(OURS).parse(raw) is Flaw.CORRUPT


@given(CONTENTS, CONTENTS, ROWS)
def test_a_record_is_of_one_content_only(content, other, row):
    header = RecordFormat(OURS).header(content, memoryview(row))
    flaw = RecordFormat(OURS).flaw(header, other, memoryview(row))
    assert (flaw is None) == (content == other)


@given(CONTENTS, st.binary(min_size=8, max_size=8), st.binary(min_size=8, max_size=8))
def test_rows_of_two_records_that_changed_places_are_seen(content, first, second):
    header = RecordFormat(OURS).header(content, memoryview(first))
    other = RecordFormat(OURS).header((content[0] ^ 1, content[1]), memoryview(first))
    flaw = RecordFormat(OURS).flaw(header, content, memoryview(second))
    assert (flaw is None) == (first == second)
    # The checksum of a row is keyed: that of the same bytes under another key does not verify.
    assert header[116:124] != other[116:124]
    forged = header[:116] + other[116:]
    assert RecordFormat(OURS).flaw(forged, content, memoryview(first)) is Flaw.CORRUPT


@given(CONTENTS, ROWS)
def test_another_namespace_is_foreign(content, row):
    header = RecordFormat(THEIRS).header(content, memoryview(row))
    assert RecordFormat(OURS).flaw(header, content, memoryview(row)) is Flaw.FOREIGN
    said = RecordFormat(OURS).parse(header)
    assert isinstance(said, Header)
    assert not said.is_ours


@given(st.binary(max_size=200))
def test_garbage_is_no_header(raw):
    assert RecordFormat(OURS).parse(raw[:HEADER_BYTES]) in (Flaw.CORRUPT, Flaw.TORN)


@pytest.mark.parametrize(
    ("content", "row"), [((0, b""), b"x"), ((0, b"a" * 65), b"x"), ((0, b"a"), b""), ((-1, b"a"), b"x")]
)
def test_what_cannot_be_kept_is_refused(content, row):
    with pytest.raises(LocalError, match="cannot be kept"):
        RecordFormat(OURS).header(content, memoryview(row))


@given(st.lists(st.tuples(CONTENTS, ROWS), max_size=8), st.binary(max_size=300), st.integers(0, 2000))
def test_a_scan_finds_whole_records_and_cuts_off_what_is_none(tmp_path_factory, records, tail, cut):
    path = tmp_path_factory.mktemp("scan") / "file"
    data, expected, offset = b"", [], 0
    for content, row in records:
        expected.append((content, len(data), len(data) + HEADER_BYTES + len(row)))
        data += RecordFormat(OURS).header(content, memoryview(row)) + row
    data = (data + tail)[:cut]
    path.write_bytes(data)
    file = os.open(path, os.O_RDONLY)
    try:
        found = scan(Files(), file, RecordFormat(OURS))
    finally:
        os.close(file)
    whole = [(content, start) for content, start, end in expected if end <= len(data)]
    assert found.entries == whole
    offset = max((end for _content, _start, end in expected if end <= len(data)), default=0)
    assert found.length_bytes == offset
    assert sum(found.flaws.values()) == (offset < len(data))


@given(st.lists(st.tuples(ROWS, st.binary(max_size=3000)), min_size=1, max_size=6))
def test_records_are_found_behind_whatever_lies_between_them(tmp_path_factory, parts):
    path = tmp_path_factory.mktemp("scan") / "file"
    data, expected, gaps = b"", [], 0
    for index, (row, gap) in enumerate(parts):
        content = (index, b"hash")
        expected.append((content, len(data)))
        data += RecordFormat(OURS).header(content, memoryview(row)) + row + gap
        gaps += bool(gap)
    path.write_bytes(data)
    file = os.open(path, os.O_RDONLY)
    try:
        found = scan(Files(), file, RecordFormat(OURS))
    finally:
        os.close(file)
    assert found.entries == expected
    assert found.length_bytes == len(data) - len(parts[-1][1])
    assert sum(found.flaws.values()) == gaps


def test_a_record_behind_much_garbage_is_found(tmp_path):
    garbage = os.urandom(2_200_000) + b"KVCR" * 10
    record = RecordFormat(OURS).header((0, b"a"), memoryview(b"row")) + b"row"
    # The search reads a MiB at a time: the header lies around the end of one.
    for length in (100, *range((1 << 20) - 140, (1 << 20) + 10, 7), len(garbage)):
        (tmp_path / "file").write_bytes(garbage[-length:] + record)
        file = os.open(tmp_path / "file", os.O_RDONLY)
        found = scan(Files(), file, RecordFormat(OURS))
        os.close(file)
        assert found.entries == [((0, b"a"), length)]


def test_a_foreign_record_is_skipped_and_what_follows_is_found(tmp_path):
    data = b""
    for namespace, name in ((OURS, b"a"), (THEIRS, b"b"), (OURS, b"c")):
        data += RecordFormat(namespace).header((0, name), memoryview(name * 100)) + name * 100
    (tmp_path / "file").write_bytes(data)
    file = os.open(tmp_path / "file", os.O_RDONLY)
    found = scan(Files(), file, RecordFormat(OURS))
    os.close(file)
    assert [content for content, _offset in found.entries] == [(0, b"a"), (0, b"c")]
    assert found.flaws == {Flaw.FOREIGN: 1}
    assert found.length_bytes == len(data)
