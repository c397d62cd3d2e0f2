"""What a worker does with its own memory before anybody asks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.shard import HeadInterval, shard_heads
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup
from kvconnect.config import parse_kv_transfer_config
from kvconnect.engine.memory import MemoryEngine
from kvconnect.errors import ConfigError, PeerError
from kvconnect.metrics import Metrics
from kvconnect.pack.arena import Arena
from kvconnect.pack.packer import Packer
from kvconnect.pack.shared_memory import MappedMemory
from kvconnect.peer.messages import CacheMeaning, Introduction
from kvconnect.plan.chunks import TokenSpan
from kvconnect.plan.wire import align_wire
from kvconnect.transfer.local import Local, largest_piece, open_local
from kvconnect.transfer.slots import SlotPool
from tests.identities import named
from tests.pack.sides import DEVICE, NUM_BLOCKS, Side, models, shapes
from tests.transfer.pair import PlainCache

SMALL = {"engine": "memory", "num_slots": 2, "slot_bytes": 8192}


@settings(max_examples=30, deadline=None)
@given(data=st.data(), slot_bytes=st.sampled_from([4096, 1 << 20]))
def test_warming_up_changes_no_page_and_takes_no_slot(data, slot_bytes):
    model = data.draw(models())
    side = Side(model, data.draw(shapes(model)), HeadInterval(0, model.total_heads), NUM_BLOCKS, 1)
    before = {layer.name: side.storage(layer.name).clone() for layer in model.layers}
    arena = Arena(DEVICE, slot_bytes, 2)
    pools = [SlotPool(arena.addresses, slot_bytes, 1) for _ in range(2)]
    introduction = Introduction("P", "1", 0, CacheMeaning(named(), None, 1), "memory", b"", side.table)
    Local(introduction, MemoryEngine(), side.table, torch.device(DEVICE), *pools).warm_up()
    assert all(torch.equal(side.storage(name), was) for name, was in before.items())
    assert [pool.taken for pool in pools] == [0, 0]


@pytest.mark.parametrize("bound", ["slot_bytes", "max_bytes"])
def test_a_slot_that_cannot_hold_a_page_is_refused_at_the_start(bound):
    table = RegionTable.build(*large_pages(8192))
    assert opened(table=table, slot_bytes=8192).introduction.slot_bytes == 8192
    limits = {"max_bytes": 4096} if bound == "max_bytes" else {}
    extra = {"slot_bytes": 4096} if bound == "slot_bytes" else {}
    told = "a slot has 4096 bytes .* must hold a page of layer 'large': give slot_bytes at least 8192"
    with pytest.raises(ConfigError, match=told):
        opened(table=table, limits=limits, **extra)


def test_scratch_memory_that_peers_are_sent_holds_nothing_of_before(monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda size, **kwargs: torch.full((size,), 7, **kwargs))
    arena = Arena("cpu", 1 << 16, 2, 1 << 16)
    assert not arena.view(arena.scratch_address, arena.scratch_bytes).any()
    assert arena.view(arena.address, 1 << 16).all(), "slots are filled before they are sent"


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_largest_piece_is_what_equal_pages_and_states_need(data):
    model = data.draw(models())
    side = Side(model, data.draw(shapes(model)), HeadInterval(0, model.total_heads), NUM_BLOCKS, 1)
    slot_bytes, layer = largest_piece(side.table)
    assert layer in {region.layer for region in side.table.regions}
    groups = {group.group for group in side.table.groups}
    states = {group.group for group in side.table.groups if group.is_state}
    for order, wanted in (("pages", groups), ("rows", states)):
        chunker = Packer(
            side.table, align_wire(side.table, side.table, order), side="source", device=DEVICE
        ).chunker
        assert bool(chunker.cut([TokenSpan(group, 0, 1) for group in sorted(wanted)], slot_bytes)) == bool(
            wanted
        )


def large_pages(page_bytes):
    """What a table of one layer is built from, whose pages have so many bytes."""
    spec = AttentionSpec(4, 1, page_bytes // 16, torch.float16)
    memory = torch.zeros(2, 4, 1, page_bytes // 8, dtype=torch.float16)
    tensors = {"large": CacheTensor(memory, "block token head content")}
    return (
        KVCacheConfig(2, (KVCacheGroup(("large",), spec),)),
        {0: 4},
        tensors,
        {"large": shard_heads(1, 0, 1)},
    )


def opened(role="kv_both", bypassed=True, table=None, limits=None, **extra):
    """What a worker has for an engine that may be bypassed, or may not, and has these limits."""
    table, engine = table or PlainCache(8).table, MemoryEngine()
    engine.capabilities = replace(engine.capabilities, may_be_bypassed=bypassed, **(limits or {}))
    config = parse_kv_transfer_config({"kv_role": role, "kv_connector_extra_config": {**SMALL, **extra}})
    introduction = Introduction("P", "1", 0, CacheMeaning(named(), None, 1), "memory", b"", table)
    metrics = Metrics()
    return open_local(config, engine, introduction, table, torch.device("cpu"), 0, metrics)


@pytest.mark.parametrize(
    ("role", "extra", "shares", "maps"),
    [
        ("kv_both", {}, True, True),
        ("kv_consumer", {}, True, True),
        ("kv_producer", {}, False, True),
        ("kv_both", {"require_lane": "tcp, shared_memory"}, True, True),
        ("kv_both", {"require_lane": "rdma,tcp"}, False, False),
        ("kv_both", {"bypassed": False}, False, False),
    ],
    ids=str,
)
def test_slots_are_shared_where_the_engine_may_be_bypassed_and_that_lane_is_allowed(
    role, extra, shares, maps
):
    local = opened(role, **extra)
    card = local.introduction.memory
    assert ((card is not None), local.maps_peers) == (shares, maps)
    assert [arena.card for arena in local.arenas if arena.card is not None] == [card] * shares
    if card is not None:
        slots, mapped = local.landing.slots, MappedMemory(card)
        assert all(mapped.at(slot.address, slot.length_bytes) for slot in slots)
        assert mapped.at(local.introduction.scratch_address, local.introduction.scratch_bytes)
        with pytest.raises(PeerError):
            mapped.at(local.table.regions[0].address, 1)
        for slot in local.send.slots:
            with pytest.raises(PeerError):
                mapped.at(slot.address, 1)
