"""Rows of host memory as the target of a load hold what a copy of the sender's blocks would."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvconnect.errors import LayoutError
from kvconnect.offload.worker.jobs import RankJobs
from kvconnect.offload.worker.load_rows import LoadRows
from kvconnect.pack.packer import Packer
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.chunks import TokenSpan
from kvconnect.plan.wire import align_wire
from kvconnect.transfer.orders import OffloadReport, Park, RowCopies
from tests.offload.rows_by_hand import copy_out
from tests.offload.test_copies import NUM_BLOCKS, NUM_ROWS, Bench, caches
from tests.pack.sides import DEVICE, slot_for

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="memory of a GPU")


@pytest.mark.timeout(600)
@settings(max_examples=40)
@given(data=st.data())
def test_a_load_into_rows_leaves_what_a_copy_of_the_blocks_does(data):
    side = data.draw(caches())
    bench = Bench(side.table, side.tensors, "cpu")
    jobs = RankJobs(0)
    try:
        loads = LoadRows(side.table, bench.arena, jobs)
    except LayoutError:
        assume(False)
    good, bad = Park(1, 0, (b"a", b"b"), (1, 2)), Park(2, 0, (b"c", b"d"), (3, 4))
    loads.begin([good, bad])
    held, wanted, spans, copies = [], [], [], []
    for geometry in side.table.groups:
        count = 1 if geometry.is_state else data.draw(st.integers(1, 4))
        first = 0 if geometry.is_state else data.draw(st.integers(0, 3))
        blocks = tuple(data.draw(st.permutations(range(1, NUM_BLOCKS)))[:count])
        rows = tuple(data.draw(st.permutations(range(NUM_ROWS)))[:count])
        # Positions of a window may have no row.
        filled = [geometry.is_state or data.draw(st.booleans()) for _ in rows]
        held.append(GroupBlocks(geometry.group, first, blocks))
        places = zip(rows, filled, strict=True)
        wanted.append(GroupBlocks(geometry.group, first, tuple((row + 1) * bool(it) for row, it in places)))
        pairs = [(b, r) for b, r, it in zip(blocks, rows, filled, strict=True) if it]
        copies.append(RowCopies(geometry.group, *map(tuple, zip(*pairs, strict=True) if pairs else ((), ()))))
        tokens = geometry.block_tokens * geometry.blocks_per_kv_block
        span = (0, 1) if geometry.is_state else (first * tokens, (first + count) * tokens)
        spans.append(TokenSpan(geometry.group, *span))
    wire = align_wire(side.table, side.table)
    source = Packer(side.table, wire, side="source", device="cpu")
    target = Packer(loads.table, wire, side="target", device="cpu")
    chunks = source.chunker.cut([span for span in spans if span.group in source.chunker.groups], 1 << 20)
    num_tokens = max(span.stop for span in spans)
    sent, landed = source.stage(held, chunks, 0), target.stage(loads.pages(wanted), chunks, num_tokens)
    image, rows = bench.image(), bench.rows()
    for ours, theirs in zip(sent, landed, strict=True):
        slot = slot_for(ours)
        packed = source.pack(slot.data_ptr(), ours, 7)
        assert target.unpack(slot.data_ptr(), theirs, 7).digest == packed.digest
    copy_out(image, rows, copies)
    bench.check(image, rows)
    loads.end([good], ok=True)
    loads.end([bad], ok=False)
    assert jobs.take().offload == (OffloadReport(0, done={1: (), 2: (b"c", b"d")}),)
    assert not jobs.take().offload
