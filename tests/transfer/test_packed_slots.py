"""More requests and chunks than slots: all land, nobody waits for ever, and no slot is lost."""

from __future__ import annotations

from unittest import mock

import pytest

from kvconnect.config import ExtraConfig
from kvconnect.pack.packer import Packer
from kvconnect.peer.messages import Fetch, Landed
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.orders import Load, Orders
from tests.transfer.kernels import SlowKernels
from tests.transfer.pair import Pair, quarantined

BLOCKS = 10
"""Blocks of a request: five chunks of two."""


def crowded(num_slots, *, shared=False, **config):
    config = ExtraConfig(num_slots=num_slots, **config)
    return Pair(config, prefill_blocks=250, decode_blocks=260, shared=shared)


def blocks(number):
    """The blocks of one of many requests, on either side."""
    first = 1 + BLOCKS * number
    return tuple(range(first, first + BLOCKS)), tuple(reversed(range(first + 9, first + 9 + BLOCKS)))


@pytest.mark.parametrize("on_device", [False, True])
def test_a_processor_sends_a_chunk_before_it_packs_the_next_and_a_device_packs_all_at_once(on_device):
    pair = crowded(6)
    happened = []

    def noted(what, call):
        return lambda *args, **more: (happened.append(what), call(*args, **more))[1]

    with (
        SlowKernels("source") as kernels,
        mock.patch.object(Packer, "pack", noted("pack", Packer.pack)),
        mock.patch.object(pair.prefill.engine, "submit", noted("submit", pair.prefill.engine.submit)),
    ):
        kernels.slow = on_device
        pair.start("a", *blocks(0))
        pair.settle(20)
        kernels.finish()
        pair.settle(20)
    assert pair.landed(*blocks(0))
    assert happened == (["pack"] * 5 + ["submit"] * 5 if on_device else ["pack", "submit"] * 5)


def test_a_short_request_does_not_wait_for_a_long_one_to_end():
    pair = crowded(2)
    pair.start("long", tuple(range(1, 201)), tuple(range(201, 1, -1)))
    pair.settle(1)
    pair.start("short", (210,), (220,))
    for _ in range(200):
        pair.settle(1)
        if pair.decode.received:
            break
    assert pair.decode.received == ["short"]
    (long, _) = pair.network.heard(Fetch)
    assert len(pair.network.heard(Landed)) < len(long.chunks)
    pair.settle(200)
    assert pair.decode.received == ["short", "long"]
    assert pair.landed(tuple(range(1, 201)), tuple(range(201, 1, -1)))
    pair.assert_idle()


@pytest.mark.parametrize(("num_slots", "shared"), [(1, False), (2, False), (3, True), (6, True)])
def test_each_request_in_turn_is_lent_the_slots_that_become_free(num_slots, shared):
    """After twenty requests have begun, none has had many more chunks landed than another."""
    pair = crowded(num_slots, shared=shared)
    for number in range(20):
        pair.start(f"r{number}", *blocks(number))
    landed, seen = dict.fromkeys(range(1, 21), 0), 0
    for _ in range(400):
        pair.settle(1)
        assert len(pair.decode.transfers.decode.bay._hungry) <= 20
        said = pair.network.heard(Landed)
        for message in said[seen:]:
            landed[message.transfer_id] += 1
        seen = len(said)
        if len(pair.network.heard(Fetch)) == 20 and num_slots <= 2:
            assert max(landed.values()) - min(landed.values()) <= 2
        if len(pair.decode.received) == 20:
            break
    assert set(landed.values()) == {5}
    assert not pair.decode.failed
    assert all(pair.landed(*blocks(number)) for number in range(20))
    pair.settle()
    pair.assert_idle()


def silent_node(pair, requests):
    """A prefill node that was granted slots for so many requests, and says nothing any more."""
    other = pair.add("Q")
    other.engine.hold()
    for number in range(requests):
        source, target = blocks(20 + number)
        pair.hold(f"q{number}", source[:6], worker=other)
        pair.load(f"q{number}", target[:6], engine_id="Q", port=other.channel.port)
    pair.settle()
    pair.cut(other)
    return other


def test_a_node_that_falls_silent_with_slots_does_not_keep_others_from_theirs():
    pair = crowded(6)
    silent_node(pair, 1)
    assert 0 < pair.decode.landing.taken < 6
    for number in range(10):
        pair.start(f"r{number}", *blocks(number))
    pair.settle(60)
    assert sorted(pair.decode.received) == [f"r{number}" for number in range(10)]
    assert not pair.decode.failed
    pair.run(15)
    assert "silent for 10 s" in pair.decode.failed["q0"]
    assert quarantined(pair.decode.landing) == pair.decode.landing.taken > 0
    for number in range(10, 15):
        pair.start(f"r{number}", *blocks(number))
    pair.settle(60)
    assert len(pair.decode.received) == 16
    pair.assert_idle(100, step_s=1)


def test_requests_that_wait_for_their_prefill_hold_no_slots_that_others_need():
    """In the parallel flow D asks before the prefill has begun; its slots are of no use until then."""
    pair = crowded(2)
    for number in range(3):
        pair.load(f"early{number}", blocks(number)[1])
    pair.settle()
    pair.start("ready", *blocks(3), run_s=1)
    assert pair.decode.received == ["ready"]
    for number in range(3):
        pair.hold(f"early{number}", blocks(number)[0])
    pair.run(1)
    assert len(pair.decode.received) == 4
    assert not pair.decode.failed
    pair.assert_idle()


def test_as_many_bytes_are_under_way_as_are_allowed():
    pair = Pair(ExtraConfig(num_slots=8, max_inflight_bytes=1536), prefill_blocks=250, decode_blocks=260)
    pair.prefill.engine.hold()
    pair.start("a", *blocks(0), run_s=0)
    assert pair.prefill.gauge("inflight_bytes") == 1536
    pair.release()
    pair.settle(20)
    assert pair.landed(*blocks(0))
    pair.assert_idle()


@pytest.mark.parametrize("most_bytes", [1 << 30, 768, 1000, 1536])
def test_one_silent_decode_node_cannot_hold_all_send_slots_or_bytes(most_bytes):
    """Its batches end by their timeout only; meanwhile others are sent to with what is left."""
    pair = crowded(4, max_inflight_bytes=most_bytes)
    other = pair.add("E")
    engine, submit = pair.prefill.engine, pair.prefill.engine.submit

    def stuck(batch):
        if batch.peer.startswith("E/"):
            engine.delay_next(1000)
        submit(batch)

    engine.submit = stuck
    for number in range(4):
        source, target = blocks(20 + number)
        pair.hold(f"e{number}", source)
        groups = (GroupBlocks(0, 0, target[:10]),)
        load = Load(f"e{number}", f"handle-e{number}", ("P", "h", pair.prefill.channel.port), 40, groups)
        other.order(Orders(loads=(load,)))
    pair.run(1)
    assert pair.prefill.send.taken == 3
    pair.start("a", *blocks(0), run_s=1)
    assert pair.decode.received == ["a"]
    assert pair.landed(*blocks(0))


@pytest.mark.parametrize("num_slots", [2, 3, 4, 8])
def test_what_waits_for_its_blocks_does_not_take_the_slots_of_what_can_land(num_slots):
    pair = crowded(num_slots)
    for name, number in (("free", 0), ("used", 1)):
        source, target = blocks(number)
        pair.hold(name, source)
        pair.load(name, target, ready=lambda name=name: name == "free")
    pair.run(2)
    assert pair.decode.received == ["free"]
    assert pair.landed(*blocks(0))


def test_a_sending_whose_chunks_cannot_be_packed_ends_alone(caplog):
    """As where its kernel failed: the requests beside it are sent, and what went wrong is logged once."""
    pair = crowded(4)
    for number in range(3):
        pair.start(f"r{number}", *blocks(number))
    sender = pair.prefill.transfers.prefill.fetches.sender
    while not sender.sendings:
        pair.prefill.step(pair.clock())
        pair.decode.step(pair.clock())
    broken = next(iter(sender.sendings.values()))

    def advance(stopping):
        raise RuntimeError("an illegal memory access")

    broken.outbox.advance = advance
    pair.run(pair.decode.transfers.decode._config.load_timeout_s + 45, step_s=0.5)
    assert len(pair.decode.received) == 3
    ((_, reason),) = pair.decode.failed.items()
    assert reason == "the prefill node cannot pack its chunks: an illegal memory access"
    assert caplog.text.count("internal error in the transfer thread") == 1
