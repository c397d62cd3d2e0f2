"""What a worker does with its own memory before anybody asks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.shard import HeadInterval
from kvconnect.engine.memory import MemoryEngine
from kvconnect.pack.arena import Arena
from kvconnect.peer.messages import CacheMeaning, Introduction
from kvconnect.plan.align import TableCard
from kvconnect.worker.local import Local
from kvconnect.worker.slots import SlotPool
from tests.pack.sides import DEVICE, NUM_BLOCKS, Side, models, shapes


@settings(max_examples=30, deadline=None)
@given(data=st.data(), slot_bytes=st.sampled_from([4096, 1 << 20]))
def test_warming_up_changes_no_page_and_takes_no_slot(data, slot_bytes):
    model = data.draw(models())
    side = Side(model, data.draw(shapes(model)), HeadInterval(0, model.total_heads), NUM_BLOCKS, 1)
    before = {layer.name: side.storage(layer.name).clone() for layer in model.layers}
    arena = Arena(DEVICE, slot_bytes, 2)
    pools = [SlotPool(arena.addresses, slot_bytes, 1) for _ in range(2)]
    card = TableCard.of(side.table)
    introduction = Introduction("P", "1", 0, CacheMeaning("m", None, 1), "memory", b"", card)
    Local(introduction, MemoryEngine(), side.table, torch.device(DEVICE), *pools).warm_up()
    assert all(torch.equal(side.storage(name), was) for name, was in before.items())
    assert [pool.taken for pool in pools] == [0, 0]


def test_scratch_memory_that_peers_are_sent_holds_nothing_of_before(monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda size, **kwargs: torch.full((size,), 7, **kwargs))
    arena = Arena("cpu", 1 << 16, 2, 1 << 16)
    assert not arena.view(arena.scratch_address, arena.scratch_bytes).any()
    assert arena.view(arena.address, 1 << 16).all(), "slots are filled before they are sent"
