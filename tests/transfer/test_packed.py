"""How a request travels through slots, and what both sides must be like for it."""

from __future__ import annotations

import msgspec
import pytest

from kvconnect.config import ExtraConfig
from kvconnect.peer.messages import Fetch, Hello, Landed, Written
from kvconnect.plan.blocks import GroupBlocks
from tests.transfer.pair import D_IDS, P_IDS, PAGE_BYTES, Pair
from tests.transfer.ranks import Ranks
from tests.transfer.shapes import Model, same_blocks

MANY_LAYERS = Model({"full": 12})


def test_many_pages_travel_in_few_chunks_and_are_counted_on_both_sides():
    shape = same_blocks(16)
    ranks = Ranks(MANY_LAYERS, shape, shape, slot_bytes=1 << 15)
    truth = ranks.prefilled("a", 16 * 20)
    blocks = ranks.fetched("a", 16 * 20)
    ranks.run_until_received(1)
    assert ranks.decode[0].cache.differences(truth, blocks) == []
    (fetch,) = ranks.network.heard(Fetch)
    assert len(fetch.chunks) == len(ranks.network.heard(Landed)) > 1
    (written,) = ranks.network.heard(Written)
    for worker, direction in ((ranks.prefill[0], "sent"), (ranks.decode[0], "received")):
        assert worker.count("transfer_bytes", direction=direction) == written.total_bytes > 0
        assert worker.count("copies", direction=direction) == len(fetch.chunks)
    ranks.assert_idle()


@pytest.mark.parametrize(("side", "reason"), [("prefill", "the peer"), ("decode", "the decode node")])
def test_nothing_is_fetched_where_one_side_has_no_slots(pair, side, reason):
    """As a node that only offloads."""
    local = getattr(pair, side).local
    local.introduction = msgspec.structs.replace(local.introduction, slot_bytes=0)
    pair.start()
    pair.run(0.1)
    assert pair.decode.failed == {"a": f"it cannot be fetched: {reason} has no slots"}
    assert pair.prefill.sent == ["a"]
    assert not pair.network.heard(Fetch)
    pair.assert_idle()


def test_a_peer_without_slots_that_fetches_is_refused(pair):
    def without_slots(message):
        if not isinstance(message, Hello):
            return [message]
        introduction = msgspec.structs.replace(message.introduction, slot_bytes=0)
        return [msgspec.structs.replace(message, introduction=introduction)]

    pair.network.taps.append(without_slots)
    pair.start()
    pair.run(0.1)
    assert pair.decode.failed == {"a": "the decode node has no slots"}
    assert pair.prefill.sent == ["a"]
    pair.assert_idle()


@pytest.mark.parametrize(("ours", "theirs"), [(1024, 16384), (16384, 1024)])
def test_chunks_fit_the_smaller_of_both_sides_slots(ours, theirs):
    pair = Pair(slot_bytes=ours, prefill_slot_bytes=theirs)
    source, target = tuple(range(1, 37)), tuple(range(40, 4, -1))
    pair.start("a", source, target)
    pair.settle(60)
    assert pair.landed(source, target)
    lengths = [landed.length_bytes for landed in pair.network.heard(Landed)]
    assert max(lengths) <= 1024
    assert sum(lengths) == 3 * 36 * PAGE_BYTES
    pair.assert_idle()


ONE_ROW = Model({"full": 1}, heads=2, width=1100)
"""A token of it has 8800 bytes."""


@pytest.mark.parametrize("block_tokens", [4, 8])
def test_a_slot_that_no_row_fits_is_named_with_both_sizes(block_tokens):
    ranks = Ranks(ONE_ROW, same_blocks(4), same_blocks(block_tokens), slot_bytes=4096)
    ranks.prefilled("a", 11)
    ranks.fetched("a", 11)
    ranks.run_until_received(1)
    assert "a slot has 4096 bytes, but layer 'full.0' needs at least" in ranks.decode[0].failed["a"]
    ranks.assert_idle()


def test_a_slot_that_no_block_fits_holds_rows():
    """A block of 128 tokens has 8192 bytes; a slot has half of that."""
    ranks = Ranks(Model({"full": 1}, heads=4), same_blocks(16), same_blocks(128), slot_bytes=4096)
    truth = ranks.prefilled("a", 200)
    blocks = ranks.fetched("a", 200)
    ranks.run_until_received(1)
    assert ranks.decode[0].failed == {}
    assert ranks.decode[0].cache.differences(truth, blocks) == []
    ranks.assert_idle()


@pytest.mark.parametrize(("on_prefill", "on_decode"), [(True, True), (True, False), (False, False)])
def test_digests_are_compared_only_where_that_is_wanted(on_prefill, on_decode):
    configs = [ExtraConfig(check_digest=check) for check in (on_decode, on_prefill)]
    pair = Pair(configs[0], prefill_config=configs[1])
    pair.start()
    pair.run()
    assert pair.landed()
    assert all((landed.digest is None) != on_prefill for landed in pair.network.heard(Landed))
    pair.prefill.engine.corrupt_next(100)
    pair.start("b", (7, 8), (30, 31))
    pair.run()
    assert ("b" in pair.decode.failed) == on_decode
    assert not pair.landed((7, 8), (30, 31))
    pair.assert_idle()


def test_a_chunk_without_a_digest_is_no_use_to_who_wants_one():
    configs = [ExtraConfig(check_digest=check) for check in (True, False)]
    pair = Pair(configs[0], prefill_config=configs[1])
    pair.start()
    pair.run()
    assert "chunk 0 came without its digest" in pair.decode.failed["a"]
    assert pair.decode.count("failures", reason="landing") == 1
    assert not pair.decode.storage.any()
    pair.assert_idle()


@pytest.mark.parametrize("groups", [(), (GroupBlocks(0, 3, ()),), (GroupBlocks(0, 0, (0, 0, 0)),)])
def test_a_request_of_which_nothing_is_wanted_arrives(pair, groups):
    pair.hold("a", P_IDS)
    pair.load("a", D_IDS, groups=groups)
    pair.run()
    assert (pair.decode.received, pair.decode.failed) == (["a"], {})
    assert not pair.decode.storage.any()
    assert pair.prefill.sent == ["a"]
    pair.assert_idle()


def test_slots_that_are_taken_show(pair):
    pair.prefill.engine.hold()
    pair.start()
    pair.run(0.1)
    assert pair.decode.gauge("slots_landing") == 2
    assert pair.prefill.gauge("slots_send") == 2
    pair.prefill.engine.release()
    pair.run()
    assert pair.decode.gauge("slots_landing") == 0
    assert pair.prefill.gauge("slots_send") == 0
