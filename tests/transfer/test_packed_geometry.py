"""Every byte lands, whatever shape either side keeps it in.

What landed is compared token by token with what the request is, by indexing tensors.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.shard import Topology
from kvconnect.config import ExtraConfig
from kvconnect.peer.messages import Fetch, Written
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.orders import Hold, Orders
from tests.transfer.ranks import Ranks
from tests.transfer.shapes import KINDS, LAYOUTS, Model, Shape, same_blocks

BLOCKS = st.integers(1, 8).map(lambda sixteens: 16 * sixteens)


@st.composite
def models(draw):
    layers = {kind: draw(st.integers(0, 2)) for kind in KINDS}
    if not any(layers.values()):
        layers["full"] = 1
    return Model(
        layers,
        heads=draw(st.integers(1, 4)),
        width=draw(st.sampled_from([1, 3, 4])),
        window=draw(st.integers(1, 100)),
    )


@st.composite
def shapes(draw):
    """Kernel blocks may be smaller than blocks, which differ by kind of layer."""
    block = {kind: draw(BLOCKS) for kind in KINDS}
    kernel = {
        kind: draw(st.sampled_from([size for size in (16, 32, 48, tokens) if tokens % size == 0]))
        for kind, tokens in block.items()
    }
    return Shape(block, kernel, draw(st.sampled_from(sorted(LAYOUTS))), draw(st.booleans()))


@st.composite
def topologies(draw, model: Model, most_tensor: int):
    layers = len(model.all_names)
    cuts = draw(st.sets(st.integers(1, layers - 1), max_size=2)) if layers > 1 else ()
    return Topology(draw(st.integers(1, most_tensor)), (0, *sorted(cuts)))


def move(ranks, num_tokens, known_tokens=0, drop=(True, True), request="a"):
    """One request, from P to D; it is checked that all of it landed, and nothing else was touched."""
    truth = ranks.prefilled(request, num_tokens, drop=drop[0])
    blocks = ranks.fetched(request, num_tokens, known_tokens, drop=drop[1])
    before = [worker.cache.outside(blocks) for worker in ranks.decode]
    ranks.run_until_received(1)
    for worker, kept in zip(ranks.decode, before, strict=True):
        assert worker.failed == {}
        assert worker.cache.differences(truth, blocks) == []
        for name, now in worker.cache.outside(blocks).items():
            assert (kept[name] == now).all(), f"{name}: blocks of others were written"
    return blocks


@settings(max_examples=80)
@given(st.data())
def test_any_shape_lands_in_any_other(data):
    model = data.draw(models())
    prefill = data.draw(shapes())
    decode = data.draw(st.one_of(st.just(prefill), shapes()))
    num_tokens = data.draw(st.integers(1, 300))
    known_tokens = data.draw(st.integers(0, num_tokens - 1))
    # P keeps no less of a window than D may want.
    dropped = data.draw(st.sampled_from([(True, True), (False, True), (False, False)]))
    ranks = Ranks(
        model,
        prefill,
        decode,
        data.draw(topologies(model, 4)),
        data.draw(topologies(model, 4)),
        ExtraConfig(num_slots=data.draw(st.integers(1, 4))),
        num_blocks=70,
        slot_bytes=data.draw(st.sampled_from([1 << 15, 1 << 16, 1 << 18])),
        seed=data.draw(st.integers(0, 1000)),
    )
    move(ranks, num_tokens, known_tokens, dropped)
    ranks.assert_idle()


@pytest.mark.parametrize(
    ("prefill_ranks", "decode_ranks"), [(m, n) for m in range(1, 5) for n in range(1, 5)]
)
def test_every_number_of_ranks_with_blocks_and_layouts_that_differ(prefill_ranks, decode_ranks):
    ranks = Ranks(
        Model({"full": 2, "window": 1, "latent": 1, "state": 1}, heads=4),
        same_blocks(64, 16, layout="HND"),
        same_blocks(48, reverse_groups=True),
        prefill_ranks,
        decode_ranks,
        ExtraConfig(num_slots=2),
        slot_bytes=1 << 12,
    )
    move(ranks, num_tokens=201, known_tokens=50)
    fetches = ranks.network.heard(Fetch)
    assert sum(len(fetch.chunks) for fetch in fetches) > len(fetches), "some request took one chunk"
    ranks.assert_idle()


@pytest.mark.parametrize("kernel", [16, 64])
@pytest.mark.parametrize(
    "prefill", [same_blocks(16), same_blocks(128, 32), same_blocks(64, layout="planes outside")]
)
def test_an_earlier_turn_of_the_conversation_is_not_fetched_again(prefill, kernel):
    """D has whole blocks of the prompt already; P's blocks end elsewhere."""
    ranks = Ranks(
        Model({"full": 2, "window": 1}),
        prefill,
        same_blocks(64, kernel, layout="HND"),
        num_blocks=90,
        slot_bytes=1 << 15,
    )
    whole = Written(0, True, True, 0, 0, 0.0, "")
    for request, known_tokens in (("all", 0), ("most", 64), ("end", 192)):
        for worker in ranks.decode:
            worker.results.clear()
        blocks = move(ranks, 200, known_tokens, request=request)
        assert blocks["full"].first_block == known_tokens // 64
        (*_, written) = ranks.network.heard(Written)
        assert known_tokens == 0 or written.total_bytes < whole.total_bytes
        whole = written


def test_tokens_that_no_window_sees_any_more_need_not_be_held():
    """P keeps blocks of 16 tokens, D of 128: what D wants begins before what P has left."""
    ranks = Ranks(
        Model({"full": 1, "window": 2}, window=20),
        same_blocks(16),
        same_blocks(128),
        slot_bytes=1 << 15,
    )
    blocks = move(ranks, 250)
    assert blocks["window"].block_ids[0] == 0
    ranks.assert_idle()


def test_what_a_window_sees_must_be_held():
    ranks = Ranks(
        Model({"full": 1, "window": 1}, window=20),
        same_blocks(16),
        same_blocks(16),
        slot_bytes=1 << 15,
    )
    blocks = ranks.blocks("P", 100)
    nothing = (0,) * len(blocks["window"].block_ids)
    groups = (blocks["full"], GroupBlocks(1, 0, nothing))
    ranks.prefill[0].order(Orders(holds=(Hold("a", "handle-a", 100, groups, 30.0, 0),)))
    ranks.fetched("a", 100)
    ranks.run_until_received(1)
    assert (
        "tokens 80 to 95 of the request shall be packed, but no block holds it"
        in (ranks.decode[0].failed["a"])
    )
    ranks.assert_idle()
