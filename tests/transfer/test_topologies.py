"""Ranks of P and ranks of D that divide tokens, layers and heads in different ways.

That every byte lands, whichever layers and heads a rank has, is a property of any shape: see
``test_packed_geometry``.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvconnect.cache.shard import Topology
from kvconnect.config import ExtraConfig
from kvconnect.peer.agreement import disagreement
from kvconnect.peer.messages import Fetch, Landed, Release
from kvconnect.transfer.orders import Load, Orders
from tests.prefill.keeping import KeepingRanks
from tests.prefill.test_streaming_geometry import SteppedPrefill
from tests.transfer.kernels import SlowKernels
from tests.transfer.pair import Clock, FakeWorker, TappedNetwork
from tests.transfer.ranks import Ranks
from tests.transfer.shapes import Model, same_blocks

MODELS = {
    "full": Model({"full": 4}, heads=4),
    "latent": Model({"latent": 4}),
    "windows": Model({"full": 2, "window": 3}, heads=2),
}


def check(name, prefill, decode, blocks):
    ranks = Ranks(
        MODELS[name],
        same_blocks(blocks[0], 16, layout="HND"),
        same_blocks(blocks[1], 16, reverse_groups=True),
        prefill,
        decode,
        ExtraConfig(num_slots=2),
        slot_bytes=1 << 13,
    )
    ranks.hand_over(num_tokens=130, known_tokens=50)
    ranks.settle()
    # Every rank of P is let go, also one that nobody fetches from.
    assert [worker.sent for worker in ranks.prefill] == [["a"]] * prefill.size
    ranks.assert_idle()
    return ranks


def test_a_rank_without_layers_of_a_group_is_not_asked_for_it():
    # Layers 0, 2 are full and 1, 3, 4 are windows; the last rank of P has windows only.
    ranks = check("windows", Topology(1, (0, 3)), Topology(1), (16, 16))
    window = ranks.decode[0].cache.group_of("window")
    asked = [
        {span.group for chunk in fetch.chunks for span in chunk.spans} for fetch in ranks.network.heard(Fetch)
    ]
    assert sorted(asked, key=len) == [{window}, {0, 1}]


def test_a_rank_that_nobody_fetches_from_is_let_go():
    ranks = check("latent", Topology(2, (0, 2)), Topology(1), (16, 16))
    assert len(ranks.network.heard(Fetch)) == 2
    assert len(ranks.network.heard(Release)) == 2


def test_a_layer_that_its_rank_does_not_have_is_named():
    ranks = Ranks(MODELS["full"], same_blocks(16), same_blocks(16), Topology(1, (0, 2)))
    table = ranks.prefill[1].local.introduction.table
    kept = tuple(region for region in table.regions if region.layer != "full.3")
    ranks.prefill[1].introduce(table=replace(table, regions=kept))
    assert "layer 'full.3': the prefill node has none of it" in ranks.refused()


def test_layers_without_numbers_are_not_divided_over_pipeline_ranks():
    network = TappedNetwork(Clock())
    theirs = FakeWorker("P", 9, network, ExtraConfig()).local.introduction
    ours = replace(theirs, meaning=replace(theirs.meaning, stages=(0, 1)))
    assert disagreement(theirs, theirs) is None
    for pair in ((ours, theirs), (theirs, ours)):
        assert "layer 'layer0' has no number" in disagreement(*pair).text


@pytest.mark.parametrize("stages", [(1,), (0, 9, 3), (0, 1 << 20)])
def test_a_peer_whose_ranks_cannot_be_is_refused_by_name(stages):
    ranks = Ranks(MODELS["full"], same_blocks(16), same_blocks(16))
    worker = ranks.prefill[0]
    meaning = worker.local.introduction.meaning
    worker.introduce(meaning=replace(meaning, stages=stages))
    assert "is in no world of 1 tensor-parallel ranks" in ranks.refused()


@pytest.mark.parametrize(("prefill", "decode"), [((0, 2), (0,)), ((0,), (0, 2)), ((0, 2), (0, 2))])
@pytest.mark.parametrize("tensor", [1, 2])
def test_what_is_kept_by_name_comes_from_all_pipeline_ranks(prefill, decode, tensor):
    ranks = KeepingRanks(
        MODELS["full"],
        same_blocks(8),
        same_blocks(32),
        Topology(tensor, prefill),
        Topology(3 - tensor, decode),
    )
    truth = ranks.keep("a", 64)
    blocks = ranks.pull("a", 64)
    ranks.run_until_ended()
    assert not ranks.failed
    assert [worker.cache.differences(truth, blocks) for worker in ranks.decode] == [[]] * len(ranks.decode)


def in_turns(context: int, interleave: int, tensor: int = 0, stages: tuple[int, ...] = (0,)) -> Topology:
    return Topology(tensor or context, stages, context, interleave)


TURNS = [
    # Equal on both sides: any blocks, and turns of any length that divides them.
    *((in_turns(2, 1), in_turns(2, 1), blocks) for blocks in ((16, 16), (16, 64), (64, 16))),
    (in_turns(2, 4), in_turns(2, 4), (16, 64)),
    (in_turns(2, 16, 4, (0, 2)), in_turns(2, 16, 2), (64, 64)),
    # On one side only, or of unlike numbers of ranks: a turn is a block of who keeps more than is shared.
    (Topology(), in_turns(2, 16), (16, 16)),
    (Topology(2), in_turns(2, 16), (16, 64)),
    (in_turns(2, 16), Topology(), (16, 16)),
    (in_turns(2, 64), Topology(1, (0, 1)), (64, 64)),
    (in_turns(4, 16), in_turns(2, 16), (64, 16)),
    (in_turns(2, 16), in_turns(4, 16, 4, (0, 3)), (16, 16)),
    (in_turns(2, 16, 2, (0, 2)), in_turns(3, 16, 6), (16, 16)),
]


@pytest.mark.parametrize(("prefill", "decode", "blocks"), TURNS)
@pytest.mark.parametrize(("num_tokens", "known_tokens"), [(300, 0), (300, 129), (17, 0), (128, 64)])
def test_ranks_that_keep_tokens_in_turns(prefill, decode, blocks, num_tokens, known_tokens):
    ranks = Ranks(
        MODELS["latent"],
        same_blocks(blocks[0], 16),
        same_blocks(blocks[1], 16),
        prefill,
        decode,
        ExtraConfig(num_slots=2),
        slot_bytes=1 << 10,
    )
    ranks.hand_over(num_tokens, known_tokens)
    ranks.settle()
    assert [worker.sent for worker in ranks.prefill] == [["a"]] * prefill.size
    ranks.assert_idle()


@pytest.mark.parametrize(
    ("prefill", "decode"), [(in_turns(2, 16, 4), Topology(1)), (Topology(4), in_turns(2, 16, 4))]
)
def test_heads_and_turns(prefill, decode):
    """Two heads over four ranks: two ranks have each, and take turns."""
    shape = same_blocks(16, layout="HND")
    ranks = Ranks(Model({"full": 3}, heads=2), shape, shape, prefill, decode)
    ranks.hand_over(num_tokens=130)
    ranks.assert_idle()


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "blocks", "reason"),
    [
        (
            "latent",
            in_turns(2, 16),
            in_turns(2, 8),
            (16, 16),
            "2 context-parallel ranks in turns of 16 tokens on the prefill node, 2 ",
        ),
        ("latent", in_turns(2, 16), Topology(), (16, 64), "of the decode node has blocks of 64 tokens"),
        ("latent", Topology(), in_turns(2, 1), (16, 16), "of the prefill node has blocks of 16 tokens"),
        ("windows", in_turns(2, 16, 4), Topology(), (16, 16), "layers that see all tokens"),
        ("full", in_turns(2, 16, 4), Topology(), (16, 16), "4 heads do not have 2 ranks of each"),
    ],
)
def test_turns_that_do_not_match_are_refused_with_both_numbers(model, prefill, decode, blocks, reason):
    ranks = Ranks(MODELS[model], same_blocks(blocks[0]), same_blocks(blocks[1]), prefill, decode)
    assert reason in ranks.refused()


@pytest.mark.parametrize("is_whole", [False, True])
def test_what_is_kept_in_turns_is_sent_once_all_of_it_is_computed(is_whole):
    turns = in_turns(2, 16)
    ranks = Ranks(
        MODELS["latent"],
        same_blocks(16),
        same_blocks(16),
        Topology() if is_whole else turns,
        turns,
        num_blocks=60,
    )
    prefill = SteppedPrefill(ranks, 250)
    blocks = ranks.fetched("a", 250)
    others = ranks.others(blocks)
    ranks.settle()
    prefill.to(130)
    ranks.settle(20)
    assert not ranks.network.heard(Landed)
    prefill.arrives(blocks, others)


# Ranks of which one is behind the others, or fails


def make_ranks(prefill_ranks, decode_ranks):
    return Ranks(Model({"full": 3}), same_blocks(4), same_blocks(4), prefill_ranks, decode_ranks)


def test_a_rank_is_served_once_while_another_is_still_to_come():
    ranks = make_ranks(1, 2)
    (prefill,), (first, second) = ranks.prefill, ranks.decode
    truth = ranks.prefilled("a", 11)
    blocks = ranks.fetched("a", 11)

    def step():
        for _ in range(6):
            prefill.step(ranks.clock.now)
            first.step(ranks.clock.now)

    step()
    assert first.received == ["a"]
    assert not prefill.sent, "rank 1 has not come yet"
    again = Load("b", "handle-a", ("P", "h", prefill.channel.port), 11, tuple(blocks.values()))
    first.order(Orders(loads=(again,)))
    step()
    assert first.failed == {"b": "this decode rank has fetched or released the request"}
    ranks.settle()
    assert second.received == ["a"]
    assert second.cache.differences(truth, blocks) == []
    assert prefill.sent == ["a"]
    ranks.assert_idle()


@pytest.mark.parametrize("how", ["quiescent", "not quiescent", "death", "silence"])
def test_a_request_that_one_rank_fails_is_not_reported_while_another_rank_s_chunk_is_unpacked(how):
    ranks = make_ranks(2, 1)
    (decode,) = ranks.decode
    good, bad = ranks.prefill
    if how in ("quiescent", "not quiescent"):
        bad.engine.fail_next(quiescent=how == "quiescent", error="the link is down")
    else:
        bad.engine.hold()
    with SlowKernels("target") as kernels:
        ranks.prefilled("a", 11)
        ranks.fetched("a", 11)
        ranks.settle(6)
        assert kernels.pending
        if how == "death":
            ranks.network.kill(bad.channel.port)
        if how == "silence":
            ranks.network.cut(bad.channel.port, decode.channel.port)
            ranks.run(12)
        ranks.settle()
        assert not decode.received
        while kernels.finish():
            ranks.settle()
        assert decode.received == ["a"]
        assert "a" in decode.failed
    reported = {name: decode.cache.bytes_of(name).copy() for name in decode.cache.tensors}
    bad.engine.release()
    bad.engine.land_late()
    ranks.run(110, step_s=1)
    assert all((decode.cache.bytes_of(name) == then).all() for name, then in reported.items())
    assert decode.received == ["a"]
    decode.assert_idle()
    good.assert_idle()
    truth = ranks.prefilled("b", 11)
    if how != "death":
        ranks.network.mend(bad.channel.port, decode.channel.port)
        blocks = ranks.fetched("b", 11)
        ranks.settle()
        assert decode.cache.differences(truth, blocks) == []
        ranks.assert_idle()
