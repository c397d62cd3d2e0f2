"""Every byte lands, whatever shape either side keeps it in.

What landed is compared token by token with what the request is, by indexing tensors.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.shard import Topology
from kvconnect.config import ExtraConfig
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


def any_ranks(data, most_tensor, num_blocks):
    """Ranks of any shapes, the tokens of a request, and how many of these D has already."""
    model = data.draw(models())
    prefill = data.draw(shapes())
    decode = data.draw(st.one_of(st.just(prefill), shapes()))
    num_tokens = data.draw(st.integers(1, 300))
    known_tokens = data.draw(st.integers(0, num_tokens - 1))
    ranks = Ranks(
        model,
        prefill,
        decode,
        data.draw(topologies(model, most_tensor)),
        data.draw(topologies(model, most_tensor)),
        ExtraConfig(num_slots=data.draw(st.integers(1, 4))),
        num_blocks=num_blocks,
        slot_bytes=data.draw(st.sampled_from([1 << 15, 1 << 16, 1 << 18])),
        seed=data.draw(st.integers(0, 1000)),
    )
    return ranks, num_tokens, known_tokens


@settings(max_examples=80)
@given(st.data())
def test_any_shape_lands_in_any_other(data):
    ranks, num_tokens, known_tokens = any_ranks(data, 4, 70)
    # P keeps no less of a window than D may want.
    dropped = data.draw(st.sampled_from([(True, True), (False, True), (False, False)]))
    ranks.hand_over(num_tokens, known_tokens, dropped)
    ranks.assert_idle()


def test_what_a_window_sees_must_be_held():
    ranks = Ranks(
        Model({"full": 1, "window": 1}, window=20), same_blocks(16), same_blocks(16), slot_bytes=1 << 15
    )
    blocks = ranks.blocks("P", 100)
    nothing = (0,) * len(blocks["window"].block_ids)
    groups = (blocks["full"], GroupBlocks(1, 0, nothing))
    ranks.prefill[0].order(Orders(holds=(Hold("a", "handle-a", 100, groups, 0),)))
    ranks.fetched("a", 100)
    ranks.run_until_received(1)
    assert (
        "tokens 80 to 95 of the request shall be packed, but no block holds it"
        in (ranks.decode[0].failed["a"])
    )
    ranks.assert_idle()
