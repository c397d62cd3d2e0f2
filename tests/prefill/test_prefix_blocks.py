"""Fetches by name of what P's device has: blocks that belong to other requests at any step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.identity import Naming, Prefix
from kvconnect.cache.shard import HeadInterval
from kvconnect.offload.scheduler.hit_requirements import HitRequirements
from kvconnect.offload.worker.prefix_blocks import PrefixBlocks
from kvconnect.peer import messages as m
from kvconnect.transfer.orders import NamedBlocks
from kvconnect.transfer.parts import always
from tests.prefill.keeping import KeepingRanks
from tests.prefill.test_kept_fetches import FULL, SHAPES, ask
from tests.transfer.shapes import Model, ShapedCache, same_blocks

SEEN_IN_PART = Model({"full": 1, "window": 1, "latent": 1})


def sharing(model=FULL, prefill=None, decode=None, *ranks, **settings):
    return KeepingRanks(
        model, prefill or same_blocks(8), decode or same_blocks(8), *ranks, shares=True, **settings
    )


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1)])
def test_a_prompt_arrives_from_the_device_whatever_shapes_both_have(shape, ranks):
    prefill, decode = SHAPES[shape]
    made = sharing(SEEN_IN_PART, prefill, decode, *ranks, num_blocks=80)
    truth, _ = made.share("a", 128)
    blocks = made.pull("a", 128)
    made.run_until_ended()
    assert not made.failed
    assert not any(worker.cache.differences(truth, blocks) for worker in made.decode)
    assert all(written.on_device for written in made.network.heard(m.Written))
    made.assert_idle()


def test_what_the_device_still_computes_is_found_and_waited_for():
    ranks, computed = sharing(), []
    truth, _ = ranks.share("a", 64, lambda: bool(computed))
    assert ask(ranks, ranks.prefix("a", 64)).num_tokens == 64
    blocks = ranks.pull("a", 64)
    ranks.run(2.0)
    assert not ranks.network.heard(m.Landed)
    computed.append(True)
    ranks.run_until_ended()
    assert not ranks.failed
    assert not ranks.decode[0].cache.differences(truth, blocks)


def test_host_memory_gives_what_the_device_has_lost():
    ranks = sharing()
    ranks.share("b", 32)
    ranks.keep("a", 64)
    _, blocks = ranks.share("a", 48)
    kept = ranks.prefill[0].local.kept
    assert kept.find(ranks.prefix("a", 64), 64)[0] == 64
    assert kept.hold(ranks.prefix("a", 48), 48).on_device
    assert not kept.hold(ranks.prefix("a", 64), 64).on_device
    ranks.sharers[0].begin(blocks["full"].block_ids)
    assert not kept.hold(ranks.prefix("a", 48), 48).on_device
    assert kept.find(ranks.prefix("b", 32), 32)[0] == 32
    ranks.sharers[0].blocks.forget()
    assert kept.find(ranks.prefix("b", 32), 32)[0] == 0
    assert kept.hold(ranks.prefix("b", 32), 32) is None


def test_49_000_tokens_are_pulled_by_name():
    """3 063 names in one message, and as many blocks of 16 tokens."""
    blocks = 49_000 // 16 + 2
    ranks = sharing(
        Model({"latent": 1}), same_blocks(16), same_blocks(16), num_blocks=blocks, slot_bytes=1 << 16
    )
    truth, _ = ranks.share("a", 48_992)
    assert ask(ranks, ranks.prefix("a", 49_000)).num_tokens == 48_992
    assert ranks.prefill[0].local.kept.find(ranks.prefix("a", 48_992), 48_992)[1] == 48_992 * 8
    got = ranks.pull("a", 48_992)
    ranks.run_until_ended()
    assert not ranks.failed
    assert not ranks.decode[0].cache.differences(truth, got)
    ranks.assert_idle()


BLOCKS, NAMES = 6, 8


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, NAMES - 1), st.integers(1, BLOCKS - 1)), max_size=3),
            st.sets(st.integers(1, BLOCKS - 1), max_size=2),
            st.sampled_from(["", "", "", "forget", "restart"]),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_a_block_is_found_under_the_name_of_its_content_alone(steps):
    """Names may reach the thread that serves peers after later steps have given away their blocks."""
    cache = ShapedCache(FULL, same_blocks(8), BLOCKS, HeadInterval(0, FULL.heads), 0)
    needs = HitRequirements.of(cache.config.groups, (0,), 8)
    shared = PrefixBlocks(Naming("test", 8), needs, cache.table, BLOCKS)
    has, latest, late, step = {}, {}, [], 0
    for named, reused, event, is_late in steps:
        step = 1 if event == "restart" else step + 1
        if event:
            has.clear()
        if event == "forget":
            shared.forget()
        # As a scheduler half does: a block has one name until it is reported as reused.
        fresh = {block: name for name, block in named if block not in has}
        latest.update((name, block) for block, name in fresh.items())
        shared.begin(step, reused)
        has.update(fresh)
        for block in reused:
            has.pop(block, None)
        orders = [NamedBlocks(0, tuple(fresh), tuple(bytes([name]) for name in fresh.values()))]
        late.append((orders, shared.number))
        if not is_late:
            for one in late:
                shared.name(*one, always)
            late.clear()
    for one in late:
        shared.name(*one, always)
    for name in range(NAMES):
        held = shared.hold(Prefix(Naming("test", 8), 0, (bytes([name]),)), 8)
        assert (held is not None) == (has.get(latest.get(name)) == name)
        if held is not None:
            (block,) = held.groups[0].block_ids
            assert block == latest[name]
            assert held.is_intact()
            step += 1
            shared.begin(step, {block})
            assert not held.is_intact()
