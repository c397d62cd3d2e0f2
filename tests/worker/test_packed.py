"""Which path a request takes, and what both sides must be like for the packed one."""

from __future__ import annotations

import pytest

from kvconnect.config import ExtraConfig
from kvconnect.orders import GroupBlocks
from kvconnect.peer.messages import Declined, Fetch, Landed, Written
from tests.worker.pair import D_IDS, P_IDS, PAGE_BYTES, Pair
from tests.worker.ranks import Ranks
from tests.worker.shapes import Model, same_blocks

AUTO, DIRECT, PACKED = (ExtraConfig(path=path) for path in ("auto", "direct", "packed"))
NO_SLOTS = ExtraConfig(path="auto", num_slots=0)
MANY_LAYERS = Model({"full": 12})


def test_many_copies_are_packed_though_pages_are_equal():
    shape = same_blocks(16)
    ranks = Ranks(MANY_LAYERS, shape, shape, config=AUTO, slot_bytes=1 << 15)
    truth = ranks.prefilled("a", 16 * 20)
    blocks = ranks.fetched("a", 16 * 20)
    ranks.run_until_received(1)
    assert ranks.decode[0].cache.differences(truth, blocks) == []
    (fetch,) = ranks.network.heard(Fetch)
    assert fetch.groups
    assert len(fetch.chunks) == len(ranks.network.heard(Landed)) > 1
    assert not ranks.network.heard(Declined)
    (written,) = ranks.network.heard(Written)
    for worker, direction in ((ranks.prefill[0], "sent"), (ranks.decode[0], "received")):
        sent = worker.count("transfer_bytes", direction=direction, path="packed")
        assert sent == written.total_bytes > 0
        assert worker.count("transfer_bytes", direction=direction, path="direct") == 0
    ranks.assert_idle()


def test_few_copies_go_page_to_page_and_the_slots_come_back_at_once():
    pair = Pair(AUTO)
    pair.prefill.engine.hold()
    pair.start()
    pair.run(0.1)
    assert len(pair.network.heard(Declined)) == 1
    assert pair.network.heard(Fetch)[0].grants
    assert (pair.decode.landing.taken, pair.prefill.send.taken) == (0, 0)
    assert not pair.decode.received
    pair.prefill.engine.release()
    pair.run()
    assert pair.landed()
    assert pair.prefill.count("copies", direction="sent", path="direct") == 9
    pair.assert_idle()


@pytest.mark.parametrize("decode", [AUTO, PACKED])
@pytest.mark.parametrize("prefill", [AUTO, PACKED])
def test_one_side_is_enough_to_have_all_packed(prefill, decode):
    pair = Pair(decode, prefill_config=prefill)
    pair.start()
    pair.run()
    assert pair.landed()
    assert bool(pair.network.heard(Landed)) == (PACKED in (prefill, decode))
    pair.assert_idle()


@pytest.mark.parametrize("decode", [AUTO, DIRECT, NO_SLOTS])
@pytest.mark.parametrize("prefill", [AUTO, DIRECT, NO_SLOTS])
def test_without_slots_on_either_side_pages_are_copied(prefill, decode):
    pair = Pair(decode, prefill_config=prefill)
    pair.start()
    pair.run()
    assert pair.landed()
    assert not pair.network.heard(Landed)
    assert bool(pair.network.heard(Fetch)[0].chunks) == (prefill is AUTO and decode is AUTO)
    pair.assert_idle()


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        (DIRECT, PACKED, "no path is open: the peer has no slots"),
        (NO_SLOTS, PACKED, "no path is open: the peer has no slots"),
        (PACKED, DIRECT, "this node's path is 'packed'"),
        (PACKED, NO_SLOTS, "this node's path is 'packed'"),
    ],
)
def test_two_nodes_that_are_configured_apart_say_so(prefill, decode, reason):
    pair = Pair(decode, prefill_config=prefill)
    pair.start()
    pair.run(0.1)
    assert reason in pair.decode.failed["a"]
    pair.run(ExtraConfig().lease_s + 1)
    pair.assert_idle()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(AUTO, DIRECT), (DIRECT, AUTO), (NO_SLOTS, AUTO), (AUTO, NO_SLOTS), (DIRECT, DIRECT)],
)
def test_pages_that_differ_need_slots_on_both_sides(prefill, decode):
    ranks = Ranks(Model({"full": 1}), same_blocks(16), same_blocks(32), config=decode, prefill_config=prefill)
    ranks.prefilled("a", 40)
    ranks.fetched("a", 40)
    ranks.run_until_received(1)
    assert "rows in a page differ, source 16, target 32" in ranks.decode[0].failed["a"]
    assert "no slots" in ranks.decode[0].failed["a"]


@pytest.mark.parametrize(("ours", "theirs"), [(1024, 16384), (16384, 1024)])
def test_chunks_fit_the_smaller_of_both_sides_slots(ours, theirs):
    pair = Pair(PACKED, slot_bytes=ours, prefill_slot_bytes=theirs)
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


def test_a_slot_that_no_row_fits_leaves_the_direct_path():
    ranks = Ranks(ONE_ROW, same_blocks(4), same_blocks(4), config=AUTO, slot_bytes=4096)
    truth = ranks.prefilled("a", 11)
    blocks = ranks.fetched("a", 11)
    ranks.run_until_received(1)
    assert ranks.decode[0].failed == {}
    assert ranks.decode[0].cache.differences(truth, blocks) == []
    assert not ranks.network.heard(Fetch)[0].chunks
    ranks.assert_idle()


def test_a_slot_that_no_row_fits_is_named_with_both_sizes_where_there_is_no_other_path():
    ranks = Ranks(ONE_ROW, same_blocks(4), same_blocks(8), config=AUTO, slot_bytes=4096)
    ranks.prefilled("a", 11)
    ranks.fetched("a", 11)
    ranks.run_until_received(1)
    assert "a slot has 4096 bytes, but layer 'full.0' needs at least" in ranks.decode[0].failed["a"]
    ranks.assert_idle()


def test_a_slot_that_no_block_fits_holds_rows():
    """A block of 128 tokens has 8192 bytes; a slot has half of that."""
    ranks = Ranks(
        Model({"full": 1}, heads=4), same_blocks(16), same_blocks(128), config=PACKED, slot_bytes=4096
    )
    truth = ranks.prefilled("a", 200)
    blocks = ranks.fetched("a", 200)
    ranks.run_until_received(1)
    assert ranks.decode[0].failed == {}
    assert ranks.decode[0].cache.differences(truth, blocks) == []
    ranks.assert_idle()


@pytest.mark.parametrize(("on_prefill", "on_decode"), [(True, True), (True, False), (False, False)])
def test_digests_are_compared_only_where_that_is_wanted(on_prefill, on_decode):
    configs = [ExtraConfig(path="packed", check_digest=check) for check in (on_decode, on_prefill)]
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
    configs = [ExtraConfig(path="packed", check_digest=check) for check in (True, False)]
    pair = Pair(configs[0], prefill_config=configs[1])
    pair.start()
    pair.run()
    assert "chunk 0 came without its digest" in pair.decode.failed["a"]
    assert pair.decode.count("failures", reason="landing") == 1
    assert not pair.decode.storage.any()
    pair.assert_idle()


@pytest.mark.parametrize("groups", [(), (GroupBlocks(0, 3, ()),), (GroupBlocks(0, 0, (0, 0, 0)),)])
@pytest.mark.parametrize("config", [AUTO, DIRECT, PACKED])
def test_a_request_of_which_nothing_is_wanted_arrives(config, groups):
    pair = Pair(config)
    pair.hold("a", P_IDS)
    pair.load("a", D_IDS, groups=groups)
    pair.run()
    assert (pair.decode.received, pair.decode.failed) == (["a"], {})
    assert not pair.decode.storage.any()
    assert pair.prefill.sent == ["a"]
    pair.assert_idle()


def test_slots_that_are_taken_show():
    pair = Pair(PACKED)
    pair.prefill.engine.hold()
    pair.start()
    pair.run(0.1)
    assert pair.decode.gauge("slots_landing") == 2
    assert pair.prefill.gauge("slots_send") == 2
    pair.prefill.engine.release()
    pair.run()
    assert pair.decode.gauge("slots_landing") == 0
    assert pair.prefill.gauge("slots_send") == 0
