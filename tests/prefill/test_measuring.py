"""What a measurement leaves of the slots that it packs into."""

from __future__ import annotations

from itertools import repeat
from types import SimpleNamespace

import pytest

from kvconnect.engine.base import Completion
from kvconnect.pack.batches import PackTicket
from kvconnect.prefill.measuring import _PackedOutbox
from kvconnect.transfer.slots import SlotPool

SCRATCH = 1 << 20


@pytest.mark.parametrize("quiescent", [True, False])
def test_however_a_batch_of_a_measurement_ends_its_slot_is_free(quiescent):
    pool = SlotPool([4096 * (1 + index) for index in range(4)], 4096, 1)
    packer = SimpleNamespace(is_blocking=False, pack=lambda slot, staged, seed: PackTicket(None))
    supply = SimpleNamespace(
        count=0, taken=0, has_next=True, take=lambda: (0, SimpleNamespace(total_bytes=4096))
    )
    local = SimpleNamespace(send=pool, introduction=SimpleNamespace(scratch_address=SCRATCH))
    outbox = _PackedOutbox(packer, supply, "D", local, repeat(9 * SCRATCH))
    submitted = []
    for _ in range(4):
        assert not list(outbox.advance(stopping=False)), "no landing slot is written"
        while (columns := outbox.peek()) is not None:
            assert columns[0].tolist() == [SCRATCH]
            submitted.append(len(submitted))
            outbox.submitted(submitted[-1])
    assert pool.taken == 3, "never the last one"
    supply.has_next = False
    for number in submitted:
        parcel = outbox.ended(Completion(number, False, quiescent, 0, 0.0, "cut"))
        assert (parcel is not None) == quiescent, "nobody waits for its slot"
    assert pool.free == 4
