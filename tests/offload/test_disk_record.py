"""Records: what was written verifies, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvconnect.errors import LocalError
from kvconnect.offload.record import (
    HEADER_BYTES,
    MAX_FOOTER_BYTES,
    RecordFormat,
    namespace_of,
    opened,
    sealed,
)

OURS, THEIRS = "ab" * 32, "ab" * 31 + "ac"
CONTENTS = st.tuples(st.integers(0, 2**31), st.binary(min_size=1, max_size=64))
ROWS = st.binary(min_size=1, max_size=400)


@given(CONTENTS, ROWS)
def test_a_header_says_what_it_was_made_of(content, row):
    header = RecordFormat(OURS).header(content, memoryview(row))
    assert len(header) == HEADER_BYTES
    assert RecordFormat(OURS).flaw(header, content, memoryview(row)) == ""
    assert namespace_of(header) == bytes.fromhex(OURS)


@given(CONTENTS, ROWS, st.data())
def test_one_changed_bit_is_seen(content, row, data):
    record = bytearray(RecordFormat(OURS).header(content, memoryview(row)) + row)
    at = data.draw(st.integers(0, len(record) - 1))
    record[at] ^= 1 << data.draw(st.integers(0, 7))
    raw, view = record[:HEADER_BYTES], memoryview(record)[HEADER_BYTES:]
    assert RecordFormat(OURS).flaw(raw, content, view)
    if at < HEADER_BYTES:
        assert RecordFormat(OURS).flaw(raw, content, view) == "corrupt"
        assert namespace_of(bytes(raw)) is None


@given(CONTENTS, CONTENTS, ROWS)
def test_a_record_is_of_one_content_only(content, other, row):
    header = RecordFormat(OURS).header(content, memoryview(row))
    flaw = RecordFormat(OURS).flaw(header, other, memoryview(row))
    assert (not flaw) == (content == other)


@given(CONTENTS, st.binary(min_size=8, max_size=8), st.binary(min_size=8, max_size=8))
def test_rows_of_two_records_that_changed_places_are_seen(content, first, second):
    header = RecordFormat(OURS).header(content, memoryview(first))
    other = RecordFormat(OURS).header((content[0] ^ 1, content[1]), memoryview(first))
    flaw = RecordFormat(OURS).flaw(header, content, memoryview(second))
    assert (not flaw) == (first == second)
    # The checksum of a row is keyed: that of the same bytes under another key does not verify.
    assert header[116:124] != other[116:124]
    forged = header[:116] + other[116:]
    assert RecordFormat(OURS).flaw(forged, content, memoryview(first)) == "corrupt"


@given(CONTENTS, ROWS)
def test_another_namespace_is_foreign(content, row):
    header = RecordFormat(THEIRS).header(content, memoryview(row))
    assert RecordFormat(OURS).flaw(header, content, memoryview(row)) == "foreign"
    assert namespace_of(header) == bytes.fromhex(THEIRS)


@given(st.binary(max_size=200))
def test_garbage_is_no_header(raw):
    assert namespace_of(raw[:HEADER_BYTES]) is None
    assert RecordFormat(OURS).flaw(raw[:HEADER_BYTES], (0, b"a"), memoryview(b"x")) == "corrupt"


@pytest.mark.parametrize(
    ("content", "row"), [((0, b""), b"x"), ((0, b"a" * 65), b"x"), ((0, b"a"), b""), ((-1, b"a"), b"x")]
)
def test_what_cannot_be_kept_is_refused(content, row):
    with pytest.raises(LocalError, match="cannot be kept"):
        RecordFormat(OURS).header(content, memoryview(row))


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_footer_is_that_of_its_record_or_none(footer, data):
    header = RecordFormat(OURS).header((0, b"a"), memoryview(b"row"))
    kept = sealed(header, footer)
    assert opened(header, kept) == footer
    other = RecordFormat(OURS).header((0, b"b"), memoryview(b"row"))
    assert opened(other, kept) == b"", "another content's"
    at = data.draw(st.integers(0, len(kept) - 1))
    flipped = kept[:at] + bytes([kept[at] ^ 1]) + kept[at + 1 :]
    assert opened(header, flipped) == b""
    assert opened(header, kept[:at]) == b""


def test_a_length_that_no_row_has_is_none():
    """As in a header that somebody has made: an offset in a file has 63 bits."""
    header = bytearray(RecordFormat(OURS).header((0, b"a"), memoryview(b"row")))
    header[12:20] = (1 << 63).to_bytes(8, "little")
    header[-8:] = xxh3_64_intdigest(header[:-8]).to_bytes(8, "little")
    assert namespace_of(bytes(header)) == bytes.fromhex(OURS)
    assert RecordFormat(OURS).row_bytes(bytes(header)) == 0


def test_a_footer_has_a_bound():
    header = RecordFormat(OURS).header((0, b"a"), memoryview(b"row"))
    assert sealed(header, b"") == b""
    assert sealed(header, b"x" * MAX_FOOTER_BYTES)
    assert sealed(header, b"x" * (MAX_FOOTER_BYTES + 1)) == b""
    assert RecordFormat(OURS).row_bytes(header) == 3
    assert RecordFormat("00" * 32).row_bytes(header) == 0
