"""Fetches by name: P sends what it keeps in rows of host memory, to a D of any shape, or tells why not."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.identity import MAX_NAMES, Naming
from kvconnect.config import ExtraConfig
from kvconnect.peer import messages as m
from kvconnect.plan.chunks import TokenSpan
from kvconnect.prefill.prefill_side import STOPPING
from kvconnect.transfer.inbound_peers import _NAMES_PER_S, NameAllowance
from kvconnect.transfer.orders import Find, Orders
from kvconnect.transfer.params import NO_REQUEST
from kvconnect.transfer.slots import SlotPool
from tests.prefill.keeping import KeepingRanks
from tests.transfer.shapes import Model, same_blocks

FULL = Model({"full": 2})
HYBRID = Model({"full": 1, "window": 1, "latent": 1, "state": 1})


def keeping(**settings):
    """Ranks of which P keeps a prompt of 64 tokens."""
    ranks = KeepingRanks(FULL, same_blocks(8), same_blocks(8), **settings)
    ranks.keep("a", 64)
    return ranks


def pulled(ranks, num_tokens, known_tokens=0):
    truth = ranks.keep("a", num_tokens)
    blocks = ranks.pull("a", num_tokens, known_tokens)
    others = ranks.others(blocks)
    ranks.run_until_ended()
    ranks.check_landed(truth, blocks, others)
    assert not any(written.on_device for written in ranks.network.heard(m.Written))
    ranks.assert_idle()


def test_a_fetch_goes_on_as_soon_as_its_link_is_calibrated():
    """The end of a calibration wakes no thread, and of a fetch by name nothing else does for seconds."""
    ranks = keeping(scratch_bytes=4096)
    ranks.pull("a", 64)
    fetches = ranks.prefill[0].transfers.prefill.fetches
    waited = 0
    for _ in range(60):
        ranks.decode[0].step(ranks.clock.now)
        nap_s = ranks.prefill[0].transfers.step(ranks.clock.now)
        if fetches.pending.fetches:
            waited += 1
            assert nap_s < 0.1
    assert waited
    ranks.run_until_ended()
    assert not ranks.failed


SHAPES = {
    "16 to 64": (same_blocks(16), same_blocks(64)),
    "64 to 16": (same_blocks(64), same_blocks(16)),
    "kernel blocks on P": (same_blocks(16, 4), same_blocks(8)),
    "kernel blocks on both": (same_blocks(32, 8), same_blocks(16, 8)),
    "equal kernel blocks": (same_blocks(16, 4), same_blocks(16, 4)),
    "other layout": (same_blocks(16, 8, layout="HND"), same_blocks(16, layout="planes outside")),
    "heads outside": (same_blocks(16, 4, layout="heads outside"), same_blocks(8)),
    "groups reversed": (same_blocks(8), same_blocks(8, reverse_groups=True)),
}


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)])
def test_a_prompt_arrives_whatever_shapes_both_have(shape, ranks):
    """Attention, a window, latent rows and a state; tensor-parallel sizes that differ."""
    prefill, decode = SHAPES[shape]
    pulled(KeepingRanks(HYBRID, prefill, decode, *ranks), 64)
    pulled(KeepingRanks(HYBRID, prefill, decode, *ranks), 128, 64)


@pytest.mark.parametrize("window", [8, 9, 16, 17, 25])
def test_of_a_window_no_more_is_needed_than_the_next_token_sees(window):
    # D's blocks are larger: it wants tokens that P has no row for, and no token sees.
    model = Model({"full": 1, "window": 1}, window=window)
    ranks = KeepingRanks(model, same_blocks(8), same_blocks(32))
    ranks.keep("a", 64)
    for keeper in ranks.keepers:
        group = keeper.cache.group_of("window")
        first = (64 - window + 1) // 8
        for end in range(8, first * 8 + 1, 8):
            keeper.rows._places[group].pop(f"a:{end}".encode(), None)
    ranks.pull("a", 64)
    ranks.run_until_ended()
    assert not ranks.failed


def test_the_layers_of_a_draft_are_sent_as_they_are_named():
    ranks = KeepingRanks(Model({"full": 1, "latent": 1}), same_blocks(8), same_blocks(8), drafts=(1,))
    truth = ranks.keep("a", 64)
    # The last block of the draft's group has no name before the token after it.
    blocks = ranks.pull("a", 64, prefix=ranks.prefix("a", 72))
    ranks.run_until_ended()
    assert not ranks.failed
    assert not ranks.decode[0].cache.differences(truth, blocks)
    ranks.pull("b", 64, name="a")
    ranks.run_until_ended(2)
    assert "not all of 64 tokens is kept" in ranks.failed[0]


def ask(ranks, prefix, most=1 << 20, wait_s=0.0):
    """What P answers within a time, by the real worker of D."""
    worker = ranks.decode[0]
    order = Find("f", ("P", "h", ranks.prefill[0].channel.port), prefix, most)

    def found():
        return [one for results in worker.results for one in results.found]

    before = len(found())
    worker.order(Orders(finds=(order,)))
    ranks.settle()
    ranks.clock.now += wait_s
    ranks.settle()
    assert len(found()) == before + 1
    return found()[-1]


def test_a_peer_learns_how_much_is_kept():
    ranks = KeepingRanks(HYBRID, same_blocks(16), same_blocks(8))
    ranks.keep("a", 64)
    assert ask(ranks, ranks.prefix("a", 128)).num_tokens == 64
    (answer,) = ranks.network.heard(m.PrefixFound)
    assert answer.total_bytes == sum(
        keeper.rows._block_bytes[group.group] * sum(map(len, group.needed(64)))
        for keeper in ranks.keepers
        for group in keeper.needs.groups
    )
    assert ask(ranks, ranks.prefix("a", 128, 48)).num_tokens == 64
    assert ask(ranks, ranks.prefix("a", 128), 63).num_tokens == 0
    assert ask(ranks, ranks.prefix("b", 128)).num_tokens == 0
    # Nothing is held by it.
    ranks.assert_idle()


@given(st.lists(st.tuples(st.integers(0, 40_000), st.floats(0, 2)), max_size=60))
def test_a_peer_is_answered_for_a_long_prompt_and_then_so_many_names_a_second(asks):
    allowance, now, taken = NameAllowance(), 100.0, 0
    for names, later_s in asks:
        now += later_s
        if allowance.take(names, now):
            taken += names
        else:
            # It is refused for what it had before, and not for good.
            assert allowance.take(names, now + MAX_NAMES / _NAMES_PER_S)
            return
        assert taken <= MAX_NAMES + _NAMES_PER_S * (now - 100.0) + 1


@pytest.mark.parametrize("cut", ["failed", "timed out"])
def test_a_link_whose_calibration_was_cut_short_is_calibrated_again_at_the_breakers_pace(cut):
    ranks = keeping(scratch_bytes=4096)
    worker, prefix = ranks.prefill[0], ranks.prefix("a", 64)
    worker.engine.hold()
    if cut == "failed":
        worker.engine.fail_next(quiescent=True)
        worker.engine.release()
    assert ask(ranks, prefix, wait_s=10).seconds == math.inf
    assert worker.count("failures", reason="calibration") == 1
    # As long as it cannot be measured it is tried ever more rarely, and KV comes by handle meanwhile.
    worker.engine.hold()
    for _ in range(50):
        assert ask(ranks, prefix, wait_s=1).seconds == math.inf
    assert 5 <= worker.count("failures", reason="calibration") <= 9
    worker.engine.release()
    ranks.clock.now += 20
    order = Find("f", ("P", "h", worker.channel.port), prefix, 64)
    ranks.decode[0].order(Orders(finds=(order,)))
    for _ in range(100):
        # A batch takes one of these.
        ranks.clock.now += 0.2
        ranks.settle(1)
    assert 0 < ask(ranks, prefix).seconds < math.inf
    ranks.assert_idle()


def test_a_peer_that_asks_for_too_much_is_told_so_and_names_that_it_does_not_want_do_not_count():
    ranks = keeping()
    assert ask(ranks, ranks.prefix("a", 64)).num_tokens == 64
    ((_, inbound),) = ranks.prefill[0].transfers.inbound_peers
    inbound.names._left = 2.0
    assert ask(ranks, ranks.prefix("a", 64, 48)).num_tokens == 64
    refused = ask(ranks, ranks.prefix("a", 64, 48))
    assert "more names than it looks up" in refused.error.text
    assert refused.is_busy
    ranks.assert_idle()


def test_names_of_others_are_none_of_ours():
    ranks = keeping()
    for naming in (Naming("other", 8), Naming("test", 16)):
        prefix = msgspec.structs.replace(ranks.prefix("a", 64), naming=naming)
        found = ask(ranks, prefix)
        assert (found.num_tokens, found.naming) == (0, ranks.naming)
        ranks.pull(f"a{naming}", 64, prefix=prefix)
    ranks.run_until_ended(2)
    assert all("not all of 64 tokens is kept" in why for why in ranks.failed)
    assert len(ranks.failed) == 2
    ranks.assert_idle()


def row_reused(ranks):
    """A prompt in rows; what gives one of them away."""
    ranks.keep("a", 64)
    return lambda: ranks.keepers[0].store(0, [(b"other", 1)], into=[3])


def block_reused(ranks):
    """A prompt on the device; what gives one of its blocks away."""
    _, blocks = ranks.share("a", 64)
    return lambda: ranks.sharers[0].begin([blocks["full"].block_ids[3]])


@pytest.mark.parametrize("made", [row_reused, block_reused])
@pytest.mark.parametrize("when", ["packing", "sent"])
def test_what_is_overwritten_while_it_is_sent_does_not_count(when, made):
    ranks = KeepingRanks(FULL, same_blocks(8), same_blocks(8), shares=made is block_reused)
    give_away, landed = made(ranks), []

    def overwrite(message):
        landed.append(message)
        if len(landed) == (1 if when == "packing" else 2):
            give_away()
        return [message]

    ranks.network.insert(m.Landed, overwrite)
    ranks.pull("a", 64)
    ranks.run_until_ended()
    assert len(landed) > 1
    assert "evicted it while it was sent" in ranks.failed[0]
    (written,) = ranks.network.heard(m.Written)
    assert (written.ok, written.quiescent) == (False, True)
    assert ranks.prefill[0].count("failures", reason="evicted") == 1
    ranks.assert_idle()
    # The next one is refused: it is not there.
    ranks.pull("b", 64, name="a")
    ranks.run_until_ended(2)
    assert "not all of 64 tokens is kept" in ranks.decode[0].failed["b"]
    assert ask(ranks, ranks.prefix("a", 64)).num_tokens == 24


def test_a_row_of_another_prompt_is_no_reason_to_fail():
    ranks = keeping()
    (keeper,) = ranks.keepers
    ranks.network.taps.append(lambda message: keeper.store(0, [(b"other", 1)], into=[20]) and [message])
    ranks.pull("a", 64)
    ranks.run_until_ended()
    assert not ranks.failed


def test_a_prefill_node_that_stops_is_asked_in_vain():
    ranks = keeping()
    assert ask(ranks, ranks.prefix("a", 64)).num_tokens == 64
    ranks.prefill[0].transfers.quiesce(lambda: None, STOPPING, 30.0)
    assert "stopping" in ask(ranks, ranks.prefix("a", 64)).error.text


def test_a_peer_with_other_weights_is_asked_in_vain():
    ranks = keeping()
    assert ask(ranks, ranks.prefix("a", 64)).num_tokens == 64
    ranks.prefill[0].transfers.replace_weights({"files": "new"})
    assert "weights" in ask(ranks, ranks.prefix("a", 64)).error.text
    ranks.pull("a", 64)
    ranks.run_until_ended()
    assert "weights" in ranks.failed[0]


def test_without_slots_nothing_is_kept_for_peers():
    """As on a node that only fetches."""
    ranks = KeepingRanks(FULL, same_blocks(8), same_blocks(8))
    local = ranks.prefill[0].local
    local.send, local.kept = SlotPool((), 0, 1), None
    ranks.prefill[0].introduce(naming=None)
    local.keep(ranks.keepers[0].rows)
    ranks.keep("a", 64)
    assert local.introduction.naming is None
    assert local.kept is None
    assert ask(ranks, ranks.prefix("a", 64)).num_tokens == 0


def test_rows_that_travel_otherwise_than_blocks_are_refused_by_name():
    ranks = keeping()
    rows = ranks.keepers[0].rows
    other = []
    for region in rows.table.regions:
        axes = region.axes
        strides = {"head_stride": axes.tokens * axes.row_bytes, "token_stride": axes.row_bytes}
        axes = msgspec.structs.replace(axes, **strides)
        other.append(msgspec.structs.replace(region, axes=axes))
    rows.table = msgspec.structs.replace(rows.table, regions=tuple(other))
    ranks.pull("a", 64)
    ranks.run_until_ended()
    assert "do not travel to this decode node as its blocks do" in ranks.failed[0]
    ranks.assert_idle()


def with_prefix(pin, **changes):
    return {"prefix": msgspec.structs.replace(pin.prefix, **changes)}


def with_chunks(fetch, **changes):
    return {"chunks": tuple(msgspec.structs.replace(chunk, **changes) for chunk in fetch.chunks)}


HOSTILE = {
    "more tokens than names": (m.PinPrefix, lambda pin: {"num_tokens": 72}),
    "no end of tokens": (m.PinPrefix, lambda pin: {"num_tokens": 2**31 - 1}),
    "fewer tokens than are fetched": (m.PinPrefix, lambda pin: {"num_tokens": 32}),
    "no names": (m.PinPrefix, lambda pin: with_prefix(pin, names=())),
    "all is at hand": (m.PinPrefix, lambda pin: with_prefix(pin, start_tokens=64)),
    "from far away": (m.PinPrefix, lambda pin: with_prefix(pin, start_tokens=2**31 - 1)),
    "other names": (m.PinPrefix, lambda pin: with_prefix(pin, names=(b"x",) * MAX_NAMES)),
    "chunks beyond its tokens": (m.Fetch, lambda fetch: with_chunks(fetch, spans=(TokenSpan(0, 0, 4096),))),
    "chunks before what is held": (m.PinPrefix, lambda pin: with_prefix(pin, start_tokens=32)),
    "streams beyond": (m.Fetch, lambda fetch: with_chunks(fetch, stop_stream=99)),
}


@pytest.mark.parametrize("how", sorted(HOSTILE))
def test_a_fetch_that_makes_no_sense_is_refused(how):
    ranks = KeepingRanks(FULL, same_blocks(8), same_blocks(8))
    truth = ranks.keep("a", 64)

    kind, changed = HOSTILE[how]
    ranks.network.insert(kind, lambda said: [msgspec.structs.replace(said, **changed(said))], times=1)
    ranks.pull("bad", 64, name="a")
    ranks.run_until_ended()
    (written,) = ranks.network.heard(m.Written)
    assert not written.ok
    assert ranks.failed
    assert not ranks.prefill[0].transfers.prefill.sender.sendings
    # Others are served as if nothing had been.
    good = ranks.pull("good", 64, name="a")
    ranks.run_until_ended(2)
    assert "good" not in ranks.decode[0].failed
    assert not ranks.decode[0].cache.differences(truth, good)
    ranks.assert_idle()


def test_what_is_pinned_is_a_lease_that_ends_with_its_fetch_or_by_its_time():
    ranks = keeping()
    prefill = ranks.prefill[0].transfers.prefill
    ranks.network.lose(m.Fetch)
    ranks.pull("lost", 64, name="a")
    ranks.settle()
    (lease,) = prefill.leases.values()
    assert lease.handle == "pin:own-lost"
    ranks.network.taps.clear()
    ranks.pull("a", 64)
    ranks.run_until_received(1)
    assert [held.handle for held in prefill.leases.values()] == ["pin:own-lost"]
    for worker in ranks.decode:
        worker.order(Orders(aborted=("lost",)))
    ranks.run(ranks.config.lease_max_s + 60, step_s=5.0)
    assert not prefill.leases
    assert not ranks.prefill[0].count("failures", reason="lease_expired"), "nothing was kept from anybody"
    assert ranks.prefill[0].sent == [], "the scheduler half knows nothing of it"


def test_no_more_is_pinned_than_may_be_held():
    ranks = keeping(config=ExtraConfig(max_leases=1))
    ranks.network.lose(m.Fetch, times=1)
    ranks.pull("lost", 64, name="a")
    ranks.settle()
    ranks.pull("a", 64)
    ranks.settle()
    assert "1 requests are held already, and the prefill node holds no more" in ranks.failed[0]


def test_a_peer_pins_nothing_under_a_handle_that_is_p_s_to_choose():
    ranks = keeping()
    ranks.network.change(m.PinPrefix, handle="transfer:t")
    ranks.pull("a", 64)
    ranks.settle()
    assert not ranks.prefill[0].transfers.prefill.leases
    assert ranks.prefill[0].count("failures", reason="peer_message") == 1
    ranks.run(30.0)
    assert ranks.failed == [NO_REQUEST]
    ranks.assert_idle()
