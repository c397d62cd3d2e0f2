"""The span table against a search of every stretch by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.engine.span_table import SpanTable


@st.composite
def cases(draw):
    """Spans with gaps, and more stretches than fit a chunk, most of them in runs inside one span."""
    spans, at = [], 0
    for _ in range(draw(st.integers(0, 6))):
        at += draw(st.integers(0, 30))
        size = draw(st.integers(1, 60))
        spans.append((at, size))
        at += size
    spans = draw(st.permutations(spans))
    stretches = []
    for _ in range(draw(st.integers(0, 5))):
        start, size = draw(st.sampled_from(spans)) if spans else (0, 10)
        count = draw(st.sampled_from([1, 63, 64, 65, 130]))
        begin = draw(st.integers(0, size))
        stretches += [(start + begin, draw(st.integers(0, size - begin)))] * count
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(stretches)))
        stretches.insert(
            place, (draw(st.sampled_from([*range(-3, at + 5), 2**62])), draw(st.integers(0, 70)))
        )
    return spans, stretches


@given(cases())
def test_each_stretch_is_found_in_its_span_or_the_first_stray_is_named(case):
    spans, stretches = case
    shifts = [1000 * (index + 1) for index in range(len(spans))]
    table = SpanTable(spans, shifts)
    empty = np.empty(0, dtype=np.int64)
    columns = zip(*stretches, strict=True) if stretches else (empty, empty)
    addresses, length = (np.array(column, dtype=np.int64) for column in columns)
    expected, strays = [], []
    for number, (at, count) in enumerate(stretches):
        # An empty stretch at the end of a span is in it, unless another one begins there.
        around = [index for index, (start, _) in enumerate(spans) if start <= at]
        owner = max(around, key=lambda index: spans[index][0], default=None)
        if owner is None or at + count > sum(spans[owner]):
            strays.append(number)
        else:
            expected.append(at + shifts[owner])
    moved = np.zeros_like(addresses)
    found = table.translate(addresses, length, moved)
    assert found == table.outside(addresses, length) == (strays[0] if strays else None)
    assert strays or moved.tolist() == expected
